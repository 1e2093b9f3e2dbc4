package kube

import (
	"bytes"
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

	"github.com/trivet-csi/trivet/pki"
)

// enrolBackoff: each request stays for an hour after it was refused.
var enrolBackoff = wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Cap: 5 * time.Minute, Steps: math.MaxInt32}

// unanswered is when Kubernetes throws a request away that nobody has answered.
const unanswered = 24 * time.Hour

// EnrolOptions say who asks for a certificate, and of which authority.
type EnrolOptions struct {
	// Namespace is that of the installation, Authority AuthorityOptions.Name.
	Namespace, Authority string
	Driver, Node         string
	// Certificates are the node's own.
	Certificates *pki.Directory
}

// Enrol is the node's side of the certificates of an installation: it asks for the
// node's certificate if there is no good one, renews it at two thirds of its life,
// and trusts the CA certificates that are published, until ctx ends. It may ask as
// the service account of the pod that it runs in, no other. While the API server or
// the controller is away the certificates stay.
func Enrol(ctx context.Context, connect func() (*Client, error), o EnrolOptions) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	published, trust := newSignal(), newSignal()
	e := &enrolment{
		EnrolOptions: o,
		client:       c,
		published:    follow(ctx, "configmaps/"+o.Authority, c.watches.Resource(configMaps).Namespace(o.Namespace), named(o.Authority), whole[configMap], published),
		trust:        trust,
	}
	var both sync.WaitGroup
	both.Go(func() {
		attend(ctx, published, backoff, "Writing the CA certificates failed; it is tried again", e.keepRoots)
	})
	both.Go(func() {
		attend(ctx, trust, enrolBackoff, "Getting a certificate failed; it is tried again", e.keepOwn)
	})
	both.Wait()
}

type enrolment struct {
	EnrolOptions
	client    *Client
	published watched[configMap]
	trust     signal // the CA certificates here have changed
}

// keepRoots writes what is published. Nothing and garbage replace nothing.
func (e *enrolment) keepRoots(context.Context) (time.Duration, error) {
	p, there := e.published.one()
	if !there {
		return nodeLifetime, nil
	}
	roots := pki.JoinRoots([]byte(p.Data[rootsKey]))
	if len(roots) == 0 {
		return 0, fmt.Errorf("configmaps/%s: %s has no CA certificate that has not expired: the controller's driver puts it there", e.Authority, rootsKey)
	}
	if _, _, have, _ := e.Certificates.Read(); bytes.Equal(have, roots) { // what cannot be read is written
		return nodeLifetime, nil
	}
	if err := e.Certificates.Write(nil, nil, roots); err != nil {
		return 0, err
	}
	e.trust.raise()
	return nodeLifetime, nil
}

// keepOwn gets a certificate if it is time, and tells when it will be next.
func (e *enrolment) keepOwn(ctx context.Context) (time.Duration, error) {
	if wait := e.goodFor(); wait > 0 {
		return wait, nil
	}
	who := pki.NodeURI(e.Driver, e.Node)
	key, request, err := pki.NewRequest(who)
	if err != nil {
		return 0, err
	}
	cert, err := e.client.certificate(ctx, e.Driver, request)
	if err != nil {
		return 0, err
	}
	if _, err := owned(cert, key, who); err != nil {
		return 0, fmt.Errorf("signer %s: %w", signerName(e.Driver), err)
	}
	if err := e.Certificates.Write(cert, key, nil); err != nil {
		return 0, err
	}
	klog.FromContext(ctx).Info("Got a certificate", "identity", who)
	// Its CA may be published a moment later.
	wait, err := untilRenewal(cert)
	return max(wait, leastWait), err
}

// goodFor is how long the node's certificate needs no other; nothing if it is not good.
func (e *enrolment) goodFor() time.Duration {
	cert, key, roots, _ := e.Certificates.Read() // what cannot be read is not good
	leaf, err := owned(cert, key, pki.NodeURI(e.Driver, e.Node))
	if err != nil || len(roots) > 0 && trusted(leaf, roots) != nil {
		return 0
	}
	wait, err := untilRenewal(cert)
	if err != nil {
		return 0
	}
	return wait
}

// certificate asks the driver's signer for a certificate, and waits for the answer.
func (c *Client) certificate(ctx context.Context, driver string, request []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, unanswered, errors.New("certificatesigningrequest not answered: the driver's controller does that, when it runs"))
	defer cancel()
	name := driver + "-node-" + strings.ToLower(rand.Text())
	changed := newSignal()
	// It is watched before it is there, so that nothing of it is missed.
	answer := follow(ctx, "certificatesigningrequests/"+name, c.watches.Resource(signingRequests), named(name), whole[signingRequest], changed)
	for !answer.synced() && ctx.Err() == nil {
		pause(ctx, changed, unanswered)
	}
	err := create(ctx, c.api.Resource(signingRequests), "certificates.k8s.io/v1", "CertificateSigningRequest", map[string]any{
		"metadata": map[string]any{"name": name},
		"spec":     map[string]any{"request": request, "signerName": signerName(driver), "usages": nodeUsages},
	})
	if err != nil {
		return nil, fmt.Errorf("making a certificatesigningrequest: %w", err)
	}
	klog.FromContext(ctx).Info("Asked for a certificate; the driver's controller gives it", "request", name)
	return awaitAnswer(ctx, answer, changed)
}

func awaitAnswer(ctx context.Context, answer watched[signingRequest], changed signal) ([]byte, error) {
	for seen := false; ctx.Err() == nil; pause(ctx, changed, unanswered) {
		r, there := answer.one()
		if seen && !there {
			return nil, errors.New("certificatesigningrequest deleted before it was answered")
		}
		seen = there
		for _, kind := range []string{denied, failed} {
			if why, is := r.condition(kind); is {
				return nil, fmt.Errorf("certificatesigningrequest %s: %s", strings.ToLower(kind), why)
			}
		}
		if len(r.Status.Certificate) > 0 {
			return r.Status.Certificate, nil
		}
	}
	return nil, context.Cause(ctx)
}
