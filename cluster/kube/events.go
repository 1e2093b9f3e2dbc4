package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// maxMessage bounds the message of an event, in bytes, as the API server does for events.k8s.io.
const maxMessage = 1024

// event is core/v1 Event.
type event struct {
	Metadata      Meta            `json:"metadata"`
	Involved      objectReference `json:"involvedObject"`
	Type          string          `json:"type"`
	Message       string          `json:"message"`
	LastTimestamp string          `json:"lastTimestamp"`
	Count         int64           `json:"count"`
	Source        struct {
		Component string `json:"component"`
	} `json:"source"`
}

// objectReference is core/v1 ObjectReference.
type objectReference struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

// last returns the time at which the event was created or repeated: the zero time if another client has written it.
func (e event) last() time.Time {
	last, _ := time.Parse(time.RFC3339, e.LastTimestamp)
	return last
}

// notice is the content of an event.
type notice struct {
	// name is the name of the Event object. Two notices with the same name are one event.
	name string
	kind string // of the object that the event concerns
	of   Meta   // its metadata
	// warning is true for the type Warning, and false for Normal.
	warning         bool
	reason, message string
	// labels and annotations are those of the Event object.
	labels, annotations map[string]any
}

// eventName returns the name of an event that is derived from some texts.
func eventName(prefix string, of ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(of, "\x00")))
	return fmt.Sprintf("%s-%x", prefix, sum[:10])
}

// createEvent creates an event of the driver.
func (c *Client) createEvent(ctx context.Context, driver string, n notice) error {
	namespace, now := cmp.Or(n.of.Namespace, metav1.NamespaceDefault), eventTime()
	level := "Normal"
	if n.warning {
		level = "Warning"
	}
	return create(ctx, c.api.Resource(events).Namespace(namespace), "v1", "Event", map[string]any{
		"metadata":       map[string]any{"name": n.name, "namespace": namespace, "labels": n.labels, "annotations": n.annotations},
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": n.kind, "namespace": n.of.Namespace, "name": n.of.Name, "uid": n.of.UID},
		"type":           level, "reason": n.reason, "message": shortened(n.message),
		"source": map[string]any{"component": driver}, "firstTimestamp": now, "lastTimestamp": now, "count": int64(1),
	})
}

// recordEvent creates an event, or repeats the existing event of that name with the new message, unless that one is younger
// than interval. The API server has the state, so that a restart of the driver and several replicas repeat nothing.
func (c *Client) recordEvent(ctx context.Context, driver string, n notice, interval time.Duration) error {
	err := c.createEvent(ctx, driver, n)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	resource := c.api.Resource(events).Namespace(cmp.Or(n.of.Namespace, metav1.NamespaceDefault))
	known, err := get[event](ctx, resource, n.name)
	if err != nil || time.Since(known.last()) < interval {
		return absent(err)
	}
	_, err = patch[event](ctx, resource, known.Metadata, map[string]any{"message": shortened(n.message), "lastTimestamp": eventTime(), "count": known.Count + 1})
	if apierrors.IsConflict(err) { // another replica has repeated it
		return nil
	}
	return absent(err)
}

func eventTime() string { return metav1.Now().UTC().Format(time.RFC3339) }

// shortened returns a text of at most maxMessage bytes.
func shortened(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage-len("…")], "") + "…"
}

// warn creates an event of the type Warning of a driver. Replicas create it once in a reportInterval, because its name consists of
// prefix and a hash of its content and that time. An error is only logged, because a namespace that is being deleted accepts no
// events.
func (c *Client) warn(ctx context.Context, driver, prefix, kind string, of Meta, reason, message string) {
	n := notice{
		name: eventName(prefix, of.UID, reason, message, time.Now().Truncate(reportInterval).UTC().String()),
		kind: kind, of: of, warning: true, reason: reason, message: message,
	}
	if err := c.createEvent(ctx, driver, n); err != nil && !apierrors.IsAlreadyExists(err) {
		klog.FromContext(ctx).Error(err, "Creating an event failed", "kind", kind, "namespace", of.Namespace, "name", of.Name, "reason", reason)
	}
}
