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

// signerName returns the signer of the nodes' CertificateSigningRequests.
func signerName(driver string) string { return driver + "/node" }

// nodeUsages are the key usages of a node's certificate, sorted.
var nodeUsages = []string{"digital signature", "server auth"}

// Keys of spec.extra. The API server stores the pod of the requester's token under these keys.
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

// refusedError is the reason to refuse a request.
type refusedError string

func (e refusedError) Error() string { return string(e) }

func refused(format string, a ...any) error { return refusedError(fmt.Sprintf(format, a...)) }

// answer signs or refuses a request, unless it was already signed, denied or marked as failed.
func (k *authorityReconciler) answer(ctx context.Context, ca *pki.Authority, r signingRequest) error {
	if r.answered() {
		return nil
	}
	pub, identity, err := k.check(ctx, r)
	var reason refusedError
	switch {
	case errors.As(err, &reason):
		return k.refuse(ctx, r, string(reason))
	case err != nil:
		return err
	}
	return k.sign(ctx, ca, r, pub, identity)
}

// answered reports whether a request was signed, denied or marked as failed.
func (r signingRequest) answered() bool {
	_, isDenied := r.condition(denied)
	_, isFailed := r.condition(failed)
	return isDenied || isFailed || len(r.Status.Certificate) > 0
}

// check returns the public key and the identity in a request for a node's certificate. It refuses
// every request that was not created by the driver's pod on the requested node, even if another client
// approved the request.
func (k *authorityReconciler) check(ctx context.Context, r signingRequest) (crypto.PublicKey, *url.URL, error) {
	if want := "system:serviceaccount:" + k.Namespace + ":" + k.NodeServiceAccount; r.Spec.Username != want {
		return nil, nil, refused("requested by %q, expected %q", r.Spec.Username, want)
	}
	if usages := slices.Sorted(slices.Values(r.Spec.Usages)); !slices.Equal(usages, nodeUsages) {
		return nil, nil, refused("usages are %q, expected %q", usages, nodeUsages)
	}
	pub, identity, err := pki.ParseRequest(r.Spec.Request)
	if err != nil {
		return nil, nil, refusedError(err.Error())
	}
	node, err := k.nodeOf(ctx, r)
	if err != nil {
		return nil, nil, err
	}
	if want := pki.NodeURI(k.Driver, node); identity.String() != want.String() {
		return nil, nil, refused("the request is for %s, but its pod runs on %s", identity, want)
	}
	return pub, identity, nil
}

// nodeOf returns the node of the pod that created a request.
func (k *authorityReconciler) nodeOf(ctx context.Context, r signingRequest) (string, error) {
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
		return "", refused("requested by pod %s with UID %s, which does not exist: the current pod %[1]s has UID %[3]s", name[0], uid[0], pod.Metadata.UID)
	case pod.Status.Phase == "Succeeded" || pod.Status.Phase == "Failed":
		return "", refused("requested by pod %s, which has ended (phase %s)", name[0], pod.Status.Phase)
	case pod.Spec.NodeName == "":
		return "", refused("requested by pod %s, which is not scheduled", name[0])
	}
	return pod.Spec.NodeName, nil
}

// sign approves a request unless another client has approved it, and issues the certificate.
func (k *authorityReconciler) sign(ctx context.Context, ca *pki.Authority, r signingRequest, pub crypto.PublicKey, identity *url.URL) error {
	if _, isApproved := r.condition(approved); !isApproved {
		var err error
		if r, err = k.addCondition(ctx, r, "approval", approved, "NodePod", "requested by the driver's pod on the node that the request names"); err != nil {
			return err
		}
	}
	cert, err := ca.Issue(pub, identity, x509.ExtKeyUsageServerAuth, nodeLifetime)
	if err != nil {
		return err
	}
	if _, err := patch[signingRequest](ctx, k.client.api.Resource(signingRequests), r.Metadata, map[string]any{"status": map[string]any{"certificate": cert}}, "status"); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Issued a node's certificate", "request", r.Metadata.Name, "identity", identity)
	return nil
}

// refuse denies a request. An approved request cannot be denied, so refuse marks it as failed.
func (k *authorityReconciler) refuse(ctx context.Context, r signingRequest, reason string) error {
	subresource, conditionType := "approval", denied
	if _, isApproved := r.condition(approved); isApproved {
		subresource, conditionType = "status", failed
	}
	if _, err := k.addCondition(ctx, r, subresource, conditionType, "Refused", reason); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Refused a request for a node's certificate", "request", r.Metadata.Name, "reason", reason)
	return nil
}

// addCondition adds a condition to the status of a request. Kubernetes accepts the conditions Approved and
// Denied only in the subresource approval, and Failed only in the subresource status.
func (k *authorityReconciler) addCondition(ctx context.Context, r signingRequest, subresource, conditionType, reason, message string) (signingRequest, error) {
	conditions := append(slices.Clone(r.Status.Conditions), map[string]any{"type": conditionType, "status": "True", "reason": reason, "message": message})
	return patch[signingRequest](ctx, k.client.api.Resource(signingRequests), r.Metadata, map[string]any{"status": map[string]any{"conditions": conditions}}, subresource)
}
