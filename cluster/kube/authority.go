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
	// controllerLifetime and nodeLifetime are the lifetimes of issued certificates.
	controllerLifetime = 7 * 24 * time.Hour
	nodeLifetime       = 30 * 24 * time.Hour
	// propagationDelay is the time for which the controller keeps its valid certificate after it publishes
	// a new CA certificate. The nodes need this time to read the new CA certificate.
	propagationDelay = 5 * time.Minute
	// invalidCAInterval is the interval at which an invalid CA is parsed again. It is long, because the
	// watch reports each change of the Secret immediately.
	invalidCAInterval = time.Hour
)

// Keys of the Secret (type kubernetes.io/tls) and of the ConfigMap.
const (
	certKey  = "tls.crt"
	keyKey   = "tls.key"
	rootsKey = "ca.crt"
)

// AuthorityOptions configures the certificate authority (CA) of an installation.
type AuthorityOptions struct {
	// Namespace is the namespace of the installation. Name is the name of the Secret that holds the CA
	// and of the ConfigMap that holds all trusted CA certificates.
	Namespace, Name string
	Driver          string // name of the CSI driver
	// NodeServiceAccount is the service account of the node pods.
	NodeServiceAccount string
	// Certificates is the directory of the controller's certificate and key.
	Certificates *pki.Directory
}

// MaintainAuthority maintains the CA of an installation until ctx ends. It creates the CA if none exists,
// publishes the CA certificate, and issues certificates to the controller and to the nodes that request
// one. It renews the controller's certificate, and a CA that this driver created, when two thirds of the
// lifetime have passed. It uses a CA that another program put into the Secret, but does not renew that CA.
// Several replicas may run MaintainAuthority concurrently. While the API server does not answer, no
// certificate changes.
func MaintainAuthority(ctx context.Context, connect func() (*Client, error), o AuthorityOptions) {
	ctx = withoutBodies(ctx)
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	changed := newSignal()
	bySigner := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.signerName", signerName(o.Driver)).String()}
	k := &authorityReconciler{
		AuthorityOptions: o,
		client:           c,
		invalidCA:        errorLog{log: klog.FromContext(ctx), message: "The certificate authority is invalid: put a valid CA into the Secret, or delete the Secret so that the driver creates a new CA"},
		secret:           watchOne[secret](ctx, c, secrets, o.Namespace, o.Name, changed),
		published:        watchOne[ConfigMap](ctx, c, configMaps, o.Namespace, o.Name, changed),
		requests:         watchObjects(ctx, "certificatesigningrequests", c.watches.Resource(signingRequests), bySigner, viewObject[signingRequest], changed),
	}
	reconcileLoop(ctx, changed, backoff, "Maintaining the certificate authority failed; retrying", k.reconcile)
}

// authorityReconciler reconciles all objects each time one of them changes.
type authorityReconciler struct {
	AuthorityOptions
	client    *Client
	secret    watched[secret]
	published watched[ConfigMap]
	requests  watched[signingRequest]

	invalidCA errorLog // logs why the CA in the Secret is invalid
	// current is the current CA certificate. currentSince is the time when this process first read it.
	current      []byte
	currentSince time.Time
}

// reconcile creates or renews the CA, publishes the CA certificate, and issues the certificates that are due.
// It returns the time after which it must be called again even if no object changes.
func (k *authorityReconciler) reconcile(ctx context.Context) (time.Duration, error) {
	if !k.secret.synced() || !k.published.synced() || !k.requests.synced() {
		return maxPause, nil
	}
	s, exists := k.secret.one()
	if !exists {
		return maxPause, k.createCA(ctx, s)
	}
	left, total, err := pki.Lifetime(s.Data[certKey])
	if err == nil && left <= total/3 && k.createdByDriver(s) {
		return maxPause, k.createCA(ctx, s)
	}
	ca, err := pki.ParseAuthority(s.Data[certKey], s.Data[keyKey])
	if err != nil {
		if left < 0 {
			err = errors.New("the CA has expired") // the original error contains the current time, so it would be logged each time
		}
		k.invalidCA.report(ctx, fmt.Errorf("secrets/%s: %w", k.Name, err))
		return invalidCAInterval, nil
	}
	k.invalidCA.report(ctx, nil)
	roots, err := k.publish(ctx, ca)
	if err != nil {
		return 0, err
	}
	wait, err := k.issueForController(ctx, ca, roots)
	return wait, errors.Join(err, k.answerRequests(ctx, ca))
}

// createCA creates a CA and writes it to the Secret. old is the current Secret, which may not exist. A
// label marks the CA as created by this driver. createCA does not return the CA, because another replica
// may write the Secret first; the watch reports the CA that the Secret contains.
func (k *authorityReconciler) createCA(ctx context.Context, old secret) error {
	ca, err := pki.NewAuthority(k.Driver)
	if err != nil {
		return err
	}
	cert, key, err := ca.PEM()
	if err != nil {
		return err
	}
	operation, logMessage := "creating", "Created a certificate authority"
	fields := map[string]any{
		"metadata": map[string]any{"labels": map[string]any{k.label(): fingerprint(cert)}},
		"data":     map[string]any{certKey: cert, keyKey: key},
	}
	if old.Metadata.Name == "" {
		fields["type"] = "kubernetes.io/tls"
	} else {
		operation, logMessage = "renewing", "Renewed the certificate authority"
	}
	if err := put(ctx, k.namespaced(secrets), "Secret", k.Name, old.Metadata, fields); err != nil {
		return fmt.Errorf("%s secrets/%s: %w", operation, k.Name, err)
	}
	klog.FromContext(ctx).Info(logMessage, "secret", k.Name)
	return nil
}

// createdByDriver reports whether this driver created the CA. If an administrator replaced the CA, the
// label contains the fingerprint of the previous certificate.
func (k *authorityReconciler) createdByDriver(s secret) bool {
	return s.Metadata.Labels[k.label()] == fingerprint(s.Data[certKey])
}

// label returns the key of the label that contains the fingerprint of a CA that this driver created.
func (k *authorityReconciler) label() string { return k.Driver + "/made" }

// fingerprint returns the first 32 hexadecimal digits of the SHA-256 hash of a certificate (PEM). The whole
// hash has 64 digits, but a label value has at most 63 characters.
func fingerprint(cert []byte) string {
	sum := sha256.Sum256(cert)
	return hex.EncodeToString(sum[:16])
}

// publish adds the CA certificate to the trusted CA certificates in the ConfigMap, and removes expired
// certificates from them. It also writes the trusted CA certificates to the controller's directory, and
// returns them. It must run before a certificate is issued.
func (k *authorityReconciler) publish(ctx context.Context, ca *pki.Authority) ([]byte, error) {
	cert, _, err := ca.PEM()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(cert, k.current) {
		k.current, k.currentSince = cert, time.Now()
	}
	p, _ := k.published.one()
	roots := pki.JoinRoots([]byte(p.Data[rootsKey]), cert)
	if p.Data[rootsKey] != string(roots) {
		data := map[string]any{"data": map[string]any{rootsKey: string(roots)}}
		if err := put(ctx, k.namespaced(configMaps), "ConfigMap", k.Name, p.Metadata, data); err != nil {
			return nil, fmt.Errorf("writing configmaps/%s: %w", k.Name, err)
		}
	}
	_, err = writeRoots(k.Certificates, roots)
	return roots, err
}

// issueForController issues a certificate to the controller if its current certificate is due for
// replacement. It returns the time until the next replacement.
func (k *authorityReconciler) issueForController(ctx context.Context, ca *pki.Authority, roots []byte) (time.Duration, error) {
	if wait := k.untilNextIssue(ca, roots); wait > 0 {
		return wait, nil
	}
	identity := pki.ControllerURI(k.Driver)
	key, request, err := pki.NewRequest(identity)
	if err != nil {
		return 0, err
	}
	pub, _, err := pki.ParseRequest(request)
	if err != nil {
		return 0, err
	}
	cert, err := ca.Issue(pub, identity, x509.ExtKeyUsageClientAuth, controllerLifetime)
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

// untilNextIssue returns the time until the controller needs a new certificate, 0 if the current
// certificate is not valid. A valid certificate is kept for at least propagationDelay after this
// process first read the CA certificate.
func (k *authorityReconciler) untilNextIssue(ca *pki.Authority, roots []byte) time.Duration {
	leaf, wait := validLeaf(k.Certificates, pki.ControllerURI(k.Driver), roots)
	if leaf == nil {
		return 0
	}
	if leaf.CheckSignatureFrom(ca.Certificate()) != nil {
		wait = 0
	}
	return max(wait, propagationDelay-time.Since(k.currentSince))
}

// answerRequests signs or refuses all pending requests of nodes. A request that another replica has
// answered, or that was deleted, causes no error.
func (k *authorityReconciler) answerRequests(ctx context.Context, ca *pki.Authority) error {
	var errs []error
	for _, r := range k.requests.all() {
		if err := k.answer(ctx, ca, r); err != nil && !lostRace(err) && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("certificatesigningrequests/%s: %w", r.Metadata.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (k *authorityReconciler) namespaced(resource schema.GroupVersionResource) dynamic.ResourceInterface {
	return k.client.api.Resource(resource).Namespace(k.Namespace)
}
