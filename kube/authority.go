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

	"github.com/trivet-csi/trivet/pki"
)

const (
	controllerLifetime = 7 * 24 * time.Hour
	nodeLifetime       = 30 * 24 * time.Hour
	// settling is how long nodes have to learn of a new CA before the controller
	// shows a certificate of it.
	settling = 5 * time.Minute
	// brokenPause: of a broken CA mostly a change of its Secret makes a good one.
	brokenPause = time.Hour
)

// Keys of the Secret, as its type kubernetes.io/tls has them, and of the ConfigMap.
const (
	certKey  = "tls.crt"
	keyKey   = "tls.key"
	rootsKey = "ca.crt"
)

// AuthorityOptions say where an installation's certificate authority (CA) is kept.
type AuthorityOptions struct {
	// Namespace is that of the installation, Name that of the Secret with the CA
	// and of the ConfigMap with all CA certificates that are to be trusted.
	Namespace, Name string
	Driver          string
	// NodeServiceAccount is whom the pods of nodes run as.
	NodeServiceAccount string
	// Certificates are the controller's own.
	Certificates *pki.Directory
}

// KeepAuthority is the controller's side of the certificates of an installation: it
// makes the CA if there is none, publishes its certificate, issues the controller's
// own and those that nodes ask for, and renews all that it made at two thirds of its
// life, until ctx ends. Several replicas may do so at once. A CA that somebody else
// put into the Secret is used, and not renewed. While the API server is away the
// certificates stay.
func KeepAuthority(ctx context.Context, connect func() (*Client, error), o AuthorityOptions) {
	ctx = withoutBodies(ctx)
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	changed := newSignal()
	bySigner := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.signerName", signerName(o.Driver)).String()}
	k := &keeper{
		AuthorityOptions: o,
		client:           c,
		broken:           complaints{log: klog.FromContext(ctx), message: "The certificate authority is broken: put a CA into the Secret, or delete it, and a new one is made"},
		secret:           follow(ctx, "secrets/"+o.Name, c.watches.Resource(secrets).Namespace(o.Namespace), named(o.Name), whole[secret], changed),
		published:        follow(ctx, "configmaps/"+o.Name, c.watches.Resource(configMaps).Namespace(o.Namespace), named(o.Name), whole[configMap], changed),
		requests:         follow(ctx, "certificatesigningrequests", c.watches.Resource(signingRequests), bySigner, whole[signingRequest], changed),
	}
	attend(ctx, changed, backoff, "Keeping the certificate authority failed; it is tried again", k.keep)
}

// keeper looks at everything each time, and does what is missing.
type keeper struct {
	AuthorityOptions
	client    *Client
	secret    watched[secret]
	published watched[configMap]
	requests  watched[signingRequest]

	broken complaints // about the CA in the Secret
	// current is the certificate of the CA, since when this process has known it.
	current []byte
	since   time.Time
}

// keep tells how long nothing is to be done but for changes.
func (k *keeper) keep(ctx context.Context) (time.Duration, error) {
	if !k.secret.synced() || !k.published.synced() || !k.requests.synced() {
		return nodeLifetime, nil
	}
	s, there := k.secret.one()
	if !there {
		return nodeLifetime, k.make(ctx)
	}
	left, of, err := pki.Remaining(s.Data[certKey])
	if err == nil && left <= of/3 && k.made(s) {
		return nodeLifetime, k.renew(ctx, s)
	}
	ca, err := pki.ParseAuthority(s.Data[certKey], s.Data[keyKey])
	if err != nil {
		if left < 0 {
			err = errors.New("the CA has expired") // the whole error has the time of day, and is another each time
		}
		k.broken.hear(ctx, fmt.Errorf("secrets/%s: %w", k.Name, err))
		return brokenPause, nil
	}
	k.broken.hear(ctx, nil)
	roots, err := k.publish(ctx, ca)
	if err != nil {
		return 0, err
	}
	wait, err := k.issueOwn(ctx, ca, roots)
	return wait, errors.Join(err, k.answerAll(ctx, ca))
}

// make makes the CA. What became of it comes by the watch, as another replica may
// have been faster.
func (k *keeper) make(ctx context.Context) error {
	fields, err := k.newSecret()
	if err != nil {
		return err
	}
	fields["type"] = "kubernetes.io/tls"
	err = create(ctx, k.in(secrets), "v1", "Secret", fields)
	if err != nil {
		return fmt.Errorf("making secrets/%s: %w", k.Name, err)
	}
	klog.FromContext(ctx).Info("Made a certificate authority", "secret", k.Name)
	return nil
}

func (k *keeper) renew(ctx context.Context, s secret) error {
	fields, err := k.newSecret()
	if err != nil {
		return err
	}
	if _, err := patch[secret](ctx, k.in(secrets), s.Metadata, fields); err != nil {
		return fmt.Errorf("renewing secrets/%s: %w", k.Name, err)
	}
	klog.FromContext(ctx).Info("Renewed the certificate authority", "secret", k.Name)
	return nil
}

// newSecret has a new CA, and a label that tells who made it.
func (k *keeper) newSecret() (map[string]any, error) {
	ca, err := pki.NewAuthority(k.Driver)
	if err != nil {
		return nil, err
	}
	cert, key, err := ca.PEM()
	return map[string]any{
		"metadata": map[string]any{"name": k.Name, "labels": map[string]any{k.label(): fingerprint(cert)}},
		"data":     map[string]any{certKey: cert, keyKey: key},
	}, err
}

// made tells whether the CA is one of newSecret: the label of one that somebody has
// replaced since is another certificate's.
func (k *keeper) made(s secret) bool {
	return s.Metadata.Labels[k.label()] == fingerprint(s.Data[certKey])
}

func (k *keeper) label() string { return k.Driver + "/made" }

// fingerprint fits into a label.
func fingerprint(cert []byte) string {
	sum := sha256.Sum256(cert)
	return hex.EncodeToString(sum[:16])
}

// publish adds the CA to those that are to be trusted and takes away what has
// expired, and then trusts them here. No certificate is issued before.
func (k *keeper) publish(ctx context.Context, ca *pki.Authority) ([]byte, error) {
	cert, _, err := ca.PEM()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(cert, k.current) {
		k.current, k.since = cert, time.Now()
	}
	p, there := k.published.one()
	roots := pki.JoinRoots([]byte(p.Data[rootsKey]), cert)
	data := map[string]any{rootsKey: string(roots)}
	switch {
	case !there:
		err = create(ctx, k.in(configMaps), "v1", "ConfigMap", map[string]any{"metadata": map[string]any{"name": k.Name}, "data": data})
	case p.Data[rootsKey] != string(roots):
		_, err = patch[configMap](ctx, k.in(configMaps), p.Metadata, map[string]any{"data": data})
	}
	if err != nil {
		return nil, fmt.Errorf("writing configmaps/%s: %w", k.Name, err)
	}
	if _, _, have, _ := k.Certificates.Read(); bytes.Equal(have, roots) { // what cannot be read is written
		return roots, nil
	}
	return roots, k.Certificates.Write(nil, nil, roots)
}

// issueOwn issues the controller's own certificate if it is time, and tells when it
// will be next.
func (k *keeper) issueOwn(ctx context.Context, ca *pki.Authority, roots []byte) (time.Duration, error) {
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
	return max(wait, leastWait), err
}

// ownWait is nothing if the controller's certificate is not good. A good one is not
// replaced until nodes know the CA.
func (k *keeper) ownWait(ca *pki.Authority, roots []byte) time.Duration {
	cert, key, _, _ := k.Certificates.Read() // what cannot be read is not good
	leaf, err := owned(cert, key, pki.ControllerURI(k.Driver))
	if err != nil || trusted(leaf, roots) != nil {
		return 0
	}
	wait, err := untilRenewal(cert)
	if err != nil || leaf.CheckSignatureFrom(ca.Certificate()) != nil {
		wait = 0
	}
	return max(wait, settling-time.Since(k.since))
}

func (k *keeper) answerAll(ctx context.Context, ca *pki.Authority) error {
	var errs []error
	for _, r := range k.requests.all() {
		if err := k.answer(ctx, ca, r); err != nil && !overtaken(err) && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("certificatesigningrequests/%s: %w", r.Metadata.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (k *keeper) in(kind schema.GroupVersionResource) dynamic.ResourceInterface {
	return k.client.api.Resource(kind).Namespace(k.Namespace)
}
