package volumemanager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/csi"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
)

// Status is the state of a manager.
type Status struct {
	Node string `json:"node"`
	// Complete is true once every manifest has been valid (manifest.Objects). Until then the manager
	// unmounts and deletes nothing.
	Complete          bool                      `json:"complete"`
	Volumes           []reconciler.VolumeStatus `json:"volumes"`
	Claims            []claim.ClaimStatus       `json:"claims"`
	PersistentVolumes []claim.VolumeStatus      `json:"persistentVolumes"`
	Drivers           []csi.DriverStatus        `json:"drivers"`
	Problems          []manifest.Problem        `json:"problems"`
	Events            []event.Event             `json:"events"`
}

// PodStatus is the state of a pod's volumes.
type PodStatus struct {
	// Known is true if the pod is in the manifests.
	Known bool `json:"known"`
	// Ready is true if all volumes of the pod are mounted.
	Ready   bool                      `json:"ready"`
	Volumes []reconciler.VolumeStatus `json:"volumes"`
}

func (m *Manager) status() Status {
	objects := m.host.manifests()
	claims, volumes := m.claims.Status()
	return Status{
		Node: m.options.NodeName, Complete: objects.Complete,
		Volumes: list(m.reconciler.Status()), Claims: list(claims), PersistentVolumes: list(volumes), Drivers: list(m.csi.Drivers()),
		Problems: list(m.store.Problems(), objects.Problems), Events: list(m.events.List()),
	}
}

// list joins slices. The result is not nil, so that its JSON is [] rather than null.
func list[T any](parts ...[]T) []T { return append([]T{}, slices.Concat(parts...)...) }

// awaitPod waits until a pod is ready or ctx ends, and returns the pod's status.
func (m *Manager) awaitPod(ctx context.Context, key types.NamespacedName) PodStatus {
	for {
		changed := m.changes.next()
		ready, volumes, known := m.reconciler.PodReady(key)
		s := PodStatus{Known: known, Ready: ready, Volumes: list(volumes)}
		if ready {
			return s
		}
		select {
		case <-ctx.Done():
			return s
		case <-changed:
		case <-time.After(time.Second): // the state can also change without a notification
		}
	}
}

// changes notifies waiting goroutines of changes. The zero value is ready to use.
type changes struct {
	mu      sync.Mutex
	changed chan struct{}
}

// next returns a channel that the next notify closes. Call it before reading the state that may change.
func (c *changes) next() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.changed
}

// notify closes the channel that next has returned.
func (c *changes) notify() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// ErrNotRunning is returned if no manager uses the root directory.
var ErrNotRunning = errors.New("no volume manager uses this directory")

// ReadStatus returns the status of the manager that uses a root directory.
func ReadStatus(ctx context.Context, root string) (s Status, err error) {
	return s, get(ctx, root, "/status", &s)
}

// AwaitPod waits until all volumes of a pod are mounted. After the timeout it returns a status that is
// not ready. While no manager uses the root directory, it waits for one.
func AwaitPod(ctx context.Context, root string, pod types.NamespacedName, timeout time.Duration) (s PodStatus, err error) {
	deadline := time.Now().Add(timeout)
	for {
		remaining := max(time.Until(deadline), 0)
		err = get(ctx, root, "/pods/"+url.PathEscape(pod.Namespace)+"/"+url.PathEscape(pod.Name)+"?wait="+remaining.String(), &s)
		if !errors.Is(err, ErrNotRunning) || remaining == 0 {
			return s, err
		}
		select {
		case <-ctx.Done():
			return s, ctx.Err()
		case <-time.After(min(remaining, 200*time.Millisecond)):
		}
	}
}

// socket returns the path of the manager's Unix socket. It returns an error if the path is too long.
func socket(root string) (string, error) {
	path := filepath.Join(stateDir(root), "manager.sock")
	if err := plugins.CheckSocket(path); err != nil {
		return "", fmt.Errorf("--root-dir %s: %w", root, err)
	}
	return path, nil
}

// get sends a request for a path to the manager's Unix socket, and decodes the JSON response.
func get(ctx context.Context, root, path string, into any) error {
	address, err := socket(root)
	if err != nil {
		return err
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", address)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://manager"+path, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return fmt.Errorf("--root-dir %s: %w: start trivet volume-manager with this --root-dir", root, ErrNotRunning)
	}
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		return errors.New(strings.TrimSpace(string(text)))
	}
	return json.NewDecoder(response.Body).Decode(into)
}
