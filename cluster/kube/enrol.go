package kube

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/cluster/pki"
)

// enrolBackoff is slow, because Kubernetes deletes a denied request only after an hour, and each attempt
// creates a request.
var enrolBackoff = wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Cap: 5 * time.Minute, Steps: math.MaxInt32}

// requestLifetime is the time after which Kubernetes deletes a pending request.
const requestLifetime = 24 * time.Hour

// EnrolOptions names the node and the authority that issues its certificate.
type EnrolOptions struct {
	// Namespace is the namespace of the installation. Authority is AuthorityOptions.Name.
	Namespace, Authority string
	Driver, Node         string
	// Certificates holds the node's own certificate and key.
	Certificates *pki.Directory
}

// Enrol maintains the certificate of a node until ctx ends. It requests a certificate if the node has no
// valid one, renews it after two thirds of its lifetime, and trusts the published CA certificates. connect
// must use the service account of this process's pod. While the API server or the controller does not
// answer, the certificates do not change.
func Enrol(ctx context.Context, connect func() (*Client, error), o EnrolOptions) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	publishedChanged, rootsChanged := newSignal(), newSignal()
	e := &enrolment{
		EnrolOptions: o,
		client:       c,
		published:    watchOne[ConfigMap](ctx, c, configMaps, o.Namespace, o.Authority, publishedChanged),
		rootsChanged: rootsChanged,
	}
	var loops sync.WaitGroup
	loops.Go(func() {
		reconcileLoop(ctx, publishedChanged, backoff, "Writing the CA certificates failed; retrying", e.keepRoots)
	})
	loops.Go(func() {
		reconcileLoop(ctx, rootsChanged, enrolBackoff, "Getting a certificate failed; retrying", e.keepCertificate)
	})
	loops.Wait()
}

type enrolment struct {
	EnrolOptions
	client       *Client
	published    watched[ConfigMap]
	rootsChanged signal // raised when the CA certificates in the node's directory change
}

// keepRoots writes the published CA certificates to the node's directory. If none of them is valid, it
// keeps the previous CA certificates.
func (e *enrolment) keepRoots(context.Context) (time.Duration, error) {
	p, found := e.published.one()
	if !found {
		return maxPause, nil
	}
	roots := pki.JoinRoots([]byte(p.Data[rootsKey]))
	if len(roots) == 0 {
		return 0, fmt.Errorf("configmaps/%s: %s contains no valid CA certificate: check that the driver's controller runs, because it writes this ConfigMap", e.Authority, rootsKey)
	}
	changed, err := writeRoots(e.Certificates, roots)
	if changed && err == nil {
		e.rootsChanged.raise()
	}
	return maxPause, err
}

// keepCertificate requests a certificate if the current one is missing, invalid or due for renewal. It
// returns the time until the next renewal.
func (e *enrolment) keepCertificate(ctx context.Context) (time.Duration, error) {
	identity := pki.NodeURI(e.Driver, e.Node)
	_, _, roots, _ := e.Certificates.Read() // keepRoots replaces an unreadable file
	if _, wait := validLeaf(e.Certificates, identity, roots); wait > 0 {
		return wait, nil
	}
	key, request, err := pki.NewRequest(identity)
	if err != nil {
		return 0, err
	}
	cert, err := e.client.requestCertificate(ctx, e.Driver, request)
	if err != nil {
		return 0, err
	}
	if _, err := parseLeaf(cert, key, identity); err != nil {
		return 0, fmt.Errorf("signer %s: %w", signerName(e.Driver), err)
	}
	if err := e.Certificates.Write(cert, key, nil); err != nil {
		return 0, err
	}
	klog.FromContext(ctx).Info("Got a certificate", "identity", identity)
	// The certificate is not verified with the roots, because its CA certificate may be published a moment later.
	wait, err := untilRenewal(cert)
	return max(wait, minWait), err
}

// requestCertificate requests a certificate from the driver's signer and waits for it.
func (c *Client) requestCertificate(ctx context.Context, driver string, request []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, requestLifetime, errors.New("the CertificateSigningRequest was not answered: check that the driver's controller runs"))
	defer cancel()
	name := driver + "-node-" + strings.ToLower(rand.Text())
	changed := newSignal()
	// The watch begins before the request exists, so that no change is missed.
	answer := watchOne[signingRequest](ctx, c, signingRequests, "", name, changed)
	for !answer.synced() && ctx.Err() == nil {
		pause(ctx, changed, requestLifetime)
	}
	err := create(ctx, c.api.Resource(signingRequests), "certificates.k8s.io/v1", "CertificateSigningRequest", map[string]any{
		"metadata": map[string]any{"name": name},
		"spec":     map[string]any{"request": request, "signerName": signerName(driver), "usages": nodeUsages},
	})
	if err != nil {
		return nil, fmt.Errorf("creating a CertificateSigningRequest: %w", err)
	}
	klog.FromContext(ctx).Info("Requested a certificate from the driver's controller", "request", name)
	return awaitAnswer(ctx, answer, changed)
}

// awaitAnswer waits until a request is signed, denied, marked as failed, or deleted.
func awaitAnswer(ctx context.Context, answer watched[signingRequest], changed signal) ([]byte, error) {
	for seen := false; ctx.Err() == nil; pause(ctx, changed, requestLifetime) {
		r, found := answer.one()
		if seen && !found {
			return nil, errors.New("the CertificateSigningRequest was deleted before it was answered")
		}
		seen = found
		for _, conditionType := range []string{denied, failed} {
			if message, ok := r.condition(conditionType); ok {
				return nil, fmt.Errorf("CertificateSigningRequest %s: %s", strings.ToLower(conditionType), message)
			}
		}
		if len(r.Status.Certificate) > 0 {
			return r.Status.Certificate, nil
		}
	}
	return nil, context.Cause(ctx)
}
