package kube

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/cluster/pki"
)

// signerName is the signer in the requests of nodes.
func signerName(driver string) string { return driver + "/node" }

// nodeUsages are the key usages of a node's certificate, sorted.
var nodeUsages = []string{"digital signature", "server auth"}

// Fields in which the API server names the pod whose token authenticated a request.
const (
	extraPodName = "authentication.kubernetes.io/pod-name"
	extraPodUID  = "authentication.kubernetes.io/pod-uid"
)

// Condition types of a CertificateSigningRequest.
const (
	approved = "Approved"
	denied   = "Denied"
	failed   = "Failed"
)

// refusedError is the reason why a request gets no certificate.
type refusedError string

func (e refusedError) Error() string { return string(e) }

func refused(format string, a ...any) error { return refusedError(fmt.Sprintf(format, a...)) }

// answer signs or refuses a request to this signer, unless it has been answered.
func (k *authorityKeeper) answer(ctx context.Context, ca *pki.Authority, r signingRequest) error {
	if r.answered() {
		return nil
	}
	pub, who, err := k.check(ctx, r)
	var why refusedError
	switch {
	case errors.As(err, &why):
		return k.refuse(ctx, r, string(why))
	case err != nil:
		return err
	}
	return k.sign(ctx, ca, r, pub, who)
}

func (r signingRequest) answered() bool {
	_, isDenied := r.condition(denied)
	_, isFailed := r.condition(failed)
	return isDenied || isFailed || len(r.Status.Certificate) > 0
}

// check refuses a request that does not come from the driver's pod on the node that the request
// names, even if another client approved the request.
func (k *authorityKeeper) check(ctx context.Context, r signingRequest) (crypto.PublicKey, *url.URL, error) {
	if want := "system:serviceaccount:" + k.Namespace + ":" + k.NodeServiceAccount; r.Spec.Username != want {
		return nil, nil, refused("requested by %q, expected %q", r.Spec.Username, want)
	}
	if usages := slices.Sorted(slices.Values(r.Spec.Usages)); !slices.Equal(usages, nodeUsages) {
		return nil, nil, refused("usages are %q, expected %q", usages, nodeUsages)
	}
	pub, who, err := pki.ParseRequest(r.Spec.Request)
	if err != nil {
		return nil, nil, refusedError(err.Error())
	}
	node, err := k.nodeOf(ctx, r)
	if err != nil {
		return nil, nil, err
	}
	if want := pki.NodeURI(k.Driver, node); who.String() != want.String() {
		return nil, nil, refused("the request is for %s, but its pod runs on %s", who, want)
	}
	return pub, who, nil
}

// nodeOf returns the node of the pod that made a request.
func (k *authorityKeeper) nodeOf(ctx context.Context, r signingRequest) (string, error) {
	name, uid := r.Spec.Extra[extraPodName], r.Spec.Extra[extraPodUID]
	if len(name) != 1 || len(uid) != 1 {
		return "", refused("the token of the request is not bound to a pod: use the token that the kubelet projects into the driver's pod")
	}
	pod, err := k.client.Pod(ctx, k.Namespace, name[0])
	switch {
	case apierrors.IsNotFound(err):
		return "", refused("requested by pod %s, which does not exist", name[0])
	case err != nil:
		return "", fmt.Errorf("reading pods/%s: %w", name[0], err)
	case pod.Metadata.UID != uid[0]:
		return "", refused("requested by pod %s with UID %s, which does not exist: the pod of that name has UID %s", name[0], uid[0], pod.Metadata.UID)
	case pod.Status.Phase == "Succeeded" || pod.Status.Phase == "Failed":
		return "", refused("requested by pod %s, which has ended: %s", name[0], pod.Status.Phase)
	case pod.Spec.NodeName == "":
		return "", refused("requested by pod %s, which is not scheduled", name[0])
	}
	return pod.Spec.NodeName, nil
}

func (k *authorityKeeper) sign(ctx context.Context, ca *pki.Authority, r signingRequest, pub crypto.PublicKey, who *url.URL) error {
	if _, is := r.condition(approved); !is {
		var err error
		if r, err = k.condition(ctx, r, "approval", approved, "NodePod", "requested by the driver's pod on that node"); err != nil {
			return err
		}
	}
	cert, err := ca.Issue(pub, who, x509.ExtKeyUsageServerAuth, nodeLifetime)
	if err != nil {
		return err
	}
	if _, err := patch[signingRequest](ctx, k.client.api.Resource(signingRequests), r.Metadata, map[string]any{"status": map[string]any{"certificate": cert}}, "status"); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Issued a node's certificate", "request", r.Metadata.Name, "identity", who)
	return nil
}

// refuse denies a request. An approved request cannot be denied: it is marked as failed.
func (k *authorityKeeper) refuse(ctx context.Context, r signingRequest, why string) error {
	subresource, kind := "approval", denied
	if _, is := r.condition(approved); is {
		subresource, kind = "status", failed
	}
	if _, err := k.condition(ctx, r, subresource, kind, "Refused", why); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Refused a request for a node's certificate", "request", r.Metadata.Name, "reason", why)
	return nil
}

func (k *authorityKeeper) condition(ctx context.Context, r signingRequest, subresource, kind, reason, message string) (signingRequest, error) {
	conditions := append(slices.Clone(r.Status.Conditions), map[string]any{"type": kind, "status": "True", "reason": reason, "message": message})
	return patch[signingRequest](ctx, k.client.api.Resource(signingRequests), r.Metadata, map[string]any{"status": map[string]any{"conditions": conditions}}, subresource)
}
