package kube

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/cluster/pki"
)

const (
	controllerLifetime = 7 * 24 * time.Hour
	nodeLifetime       = 30 * 24 * time.Hour
	// propagationDelay is the time between the publication of a new CA certificate and the first use of
	// a certificate that it signed, so that the nodes can read it.
	propagationDelay = 5 * time.Minute
	// brokenPause is long: an invalid CA usually becomes valid by a change of its Secret, and
	// the watch reports that.
	brokenPause = time.Hour
)

// Keys of the Secret (type kubernetes.io/tls) and of the ConfigMap.
const (
	certKey  = "tls.crt"
	keyKey   = "tls.key"
	rootsKey = "ca.crt"
)

// AuthorityOptions names the objects that hold the certificate authority (CA) of an
// installation.
type AuthorityOptions struct {
	// Namespace is the installation's. Name is the name of the Secret that holds the CA and
	// of the ConfigMap that holds all trusted CA certificates.
	Namespace, Name string
	Driver          string
	// NodeServiceAccount is the service account of the node pods.
	NodeServiceAccount string
	// Certificates holds the controller's own certificate and key.
	Certificates *pki.Directory
}

// KeepAuthority maintains the certificates of an installation on the controller's side, until ctx ends. It
// creates the CA if none exists, publishes its certificate, issues the controller's certificate and those
// that nodes request, and renews a certificate that it created after two thirds of the lifetime. Several
// replicas may run it concurrently. It uses a CA that another program put into the Secret, and does not
// renew that CA. While the API server does not answer, the certificates do not change.
func KeepAuthority(ctx context.Context, connect func() (*Client, error), o AuthorityOptions) {
	ctx = withoutBodies(ctx)
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	changed := newSignal()
	bySigner := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.signerName", signerName(o.Driver)).String()}
	k := &authorityKeeper{
		AuthorityOptions: o,
		client:           c,
		broken:           errorLog{log: klog.FromContext(ctx), message: "The certificate authority is invalid: put a valid CA into the Secret, or delete the Secret and a new CA is created"},
		secret:           watchOne[secret](ctx, c, secrets, o.Namespace, o.Name, changed),
		published:        watchOne[configMap](ctx, c, configMaps, o.Namespace, o.Name, changed),
		requests:         watchObjects(ctx, "certificatesigningrequests", c.watches.Resource(signingRequests), bySigner, whole[signingRequest], changed),
	}
	reconcileLoop(ctx, changed, backoff, "Maintaining the certificate authority failed; retrying", k.reconcile)
}

// authorityKeeper reconciles all objects each time one of them changes.
type authorityKeeper struct {
	AuthorityOptions
	client    *Client
	secret    watched[secret]
	published watched[configMap]
	requests  watched[signingRequest]

	broken errorLog // the CA in the Secret is invalid
	// current is the CA certificate, which this process first read at since.
	current []byte
	since   time.Time
}

// reconcile returns how long to wait for the next call if nothing changes.
func (k *authorityKeeper) reconcile(ctx context.Context) (time.Duration, error) {
	if !k.secret.synced() || !k.published.synced() || !k.requests.synced() {
		return nodeLifetime, nil
	}
	s, there := k.secret.one()
	if !there {
		return nodeLifetime, k.makeCA(ctx, s)
	}
	left, of, err := pki.Remaining(s.Data[certKey])
	if err == nil && left <= of/3 && k.created(s) {
		return nodeLifetime, k.makeCA(ctx, s)
	}
	ca, err := pki.ParseAuthority(s.Data[certKey], s.Data[keyKey])
	if err != nil {
		if left < 0 {
			err = errors.New("the CA has expired") // the original error contains the current time and would be logged each time
		}
		k.broken.report(ctx, fmt.Errorf("secrets/%s: %w", k.Name, err))
		return brokenPause, nil
	}
	k.broken.report(ctx, nil)
	roots, err := k.publish(ctx, ca)
	if err != nil {
		return 0, err
	}
	wait, err := k.issueOwn(ctx, ca, roots)
	return wait, errors.Join(err, k.answerRequests(ctx, ca))
}

// makeCA creates a CA, or replaces the one in a Secret. The result arrives by the watch, because another
// replica may have been first. The label marks a CA that this driver created.
func (k *authorityKeeper) makeCA(ctx context.Context, old secret) error {
	ca, err := pki.NewAuthority(k.Driver)
	if err != nil {
		return err
	}
	cert, key, err := ca.PEM()
	if err != nil {
		return err
	}
	doing, done := "creating", "Created a certificate authority"
	fields := map[string]any{
		"metadata": map[string]any{"labels": map[string]any{k.label(): fingerprint(cert)}},
		"data":     map[string]any{certKey: cert, keyKey: key},
	}
	if old.Metadata.Name == "" {
		fields["type"] = "kubernetes.io/tls"
	} else {
		doing, done = "renewing", "Renewed the certificate authority"
	}
	if err := put(ctx, k.in(secrets), "Secret", k.Name, old.Metadata, fields); err != nil {
		return fmt.Errorf("%s secrets/%s: %w", doing, k.Name, err)
	}
	klog.FromContext(ctx).Info(done, "secret", k.Name)
	return nil
}

// created reports whether makeCA created the CA. If an administrator replaced the CA, the label is
// the fingerprint of another certificate.
func (k *authorityKeeper) created(s secret) bool {
	return s.Metadata.Labels[k.label()] == fingerprint(s.Data[certKey])
}

func (k *authorityKeeper) label() string { return k.Driver + "/made" }

// fingerprint returns 32 characters: a label's value has at most 63.
func fingerprint(cert []byte) string {
	sum := sha256.Sum256(cert)
	return hex.EncodeToString(sum[:16])
}

// publish adds the CA certificate to the trusted ones, removes expired ones, and then trusts
// the result in this process. It runs before any certificate is issued.
func (k *authorityKeeper) publish(ctx context.Context, ca *pki.Authority) ([]byte, error) {
	cert, _, err := ca.PEM()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(cert, k.current) {
		k.current, k.since = cert, time.Now()
	}
	p, _ := k.published.one()
	roots := pki.JoinRoots([]byte(p.Data[rootsKey]), cert)
	if p.Data[rootsKey] != string(roots) {
		data := map[string]any{"data": map[string]any{rootsKey: string(roots)}}
		if err := put(ctx, k.in(configMaps), "ConfigMap", k.Name, p.Metadata, data); err != nil {
			return nil, fmt.Errorf("writing configmaps/%s: %w", k.Name, err)
		}
	}
	_, err = writeRoots(k.Certificates, roots)
	return roots, err
}

// issueOwn issues the controller's own certificate if it is due, and returns the time until
// the next one.
func (k *authorityKeeper) issueOwn(ctx context.Context, ca *pki.Authority, roots []byte) (time.Duration, error) {
	if wait := k.ownWait(ca, roots); wait > 0 {
		return wait, nil
	}
	who := pki.ControllerURI(k.Driver)
	key, request, err := pki.NewRequest(who)
	if err != nil {
		return 0, err
	}
	pub, _, err := pki.ParseRequest(request)
	if err != nil {
		return 0, err
	}
	cert, err := ca.Issue(pub, who, x509.ExtKeyUsageClientAuth, controllerLifetime)
	if err != nil {
		return 0, err
	}
	if err := k.Certificates.Write(cert, key, nil); err != nil {
		return 0, err
	}
	klog.FromContext(ctx).Info("Issued the controller's certificate")
	wait, err := untilRenewal(cert)
	return max(wait, minWait), err
}

// ownWait returns the time until the controller needs a new certificate, 0 if its certificate
// is not valid. A valid one is not replaced before the nodes can have read the CA certificate.
func (k *authorityKeeper) ownWait(ca *pki.Authority, roots []byte) time.Duration {
	leaf, wait := validLeaf(k.Certificates, pki.ControllerURI(k.Driver), roots)
	if leaf == nil {
		return 0
	}
	if leaf.CheckSignatureFrom(ca.Certificate()) != nil {
		wait = 0
	}
	return max(wait, propagationDelay-time.Since(k.since))
}

func (k *authorityKeeper) answerRequests(ctx context.Context, ca *pki.Authority) error {
	var errs []error
	for _, r := range k.requests.all() {
		if err := k.answer(ctx, ca, r); err != nil && !lostRace(err) && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("certificatesigningrequests/%s: %w", r.Metadata.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (k *authorityKeeper) in(kind schema.GroupVersionResource) dynamic.ResourceInterface {
	return k.client.api.Resource(kind).Namespace(k.Namespace)
}
