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

	"github.com/trivet-csi/trivet/pki"
)

// signerName is to whom nodes address their requests.
func signerName(driver string) string { return driver + "/node" }

// nodeUsages is what a node's certificate is for, in order.
var nodeUsages = []string{"digital signature", "server auth"}

// What the API server says of the pod whose token a request was made with.
const (
	extraPodName = "authentication.kubernetes.io/pod-name"
	extraPodUID  = "authentication.kubernetes.io/pod-uid"
)

// Types of conditions of a request.
const (
	approved = "Approved"
	denied   = "Denied"
	failed   = "Failed"
)

// refusedError is a request that gets no certificate, and why.
type refusedError string

func (e refusedError) Error() string { return string(e) }

func refused(format string, a ...any) error { return refusedError(fmt.Sprintf(format, a...)) }

// answer signs or refuses a request to this signer, unless that has been done.
func (k *keeper) answer(ctx context.Context, ca *pki.Authority, r signingRequest) error {
	if r.settled() {
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

func (r signingRequest) settled() bool {
	_, isDenied := r.condition(denied)
	_, isFailed := r.condition(failed)
	return isDenied || isFailed || len(r.Status.Certificate) > 0
}

// check refuses what is not of the driver's pod on the very node that the request
// names. That holds for a request which somebody else approved too.
func (k *keeper) check(ctx context.Context, r signingRequest) (crypto.PublicKey, *url.URL, error) {
	if want := "system:serviceaccount:" + k.Namespace + ":" + k.NodeServiceAccount; r.Spec.Username != want {
		return nil, nil, refused("made by %q, expected is %q", r.Spec.Username, want)
	}
	if usages := slices.Sorted(slices.Values(r.Spec.Usages)); !slices.Equal(usages, nodeUsages) {
		return nil, nil, refused("usages are %q, expected are %q", usages, nodeUsages)
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
		return nil, nil, refused("asks to be %s, but its pod is on a node that is %s", who, want)
	}
	return pub, who, nil
}

// nodeOf is where the pod runs that made a request.
func (k *keeper) nodeOf(ctx context.Context, r signingRequest) (string, error) {
	name, uid := r.Spec.Extra[extraPodName], r.Spec.Extra[extraPodUID]
	if len(name) != 1 || len(uid) != 1 {
		return "", refused("made with a token that is no pod's: want the token that the kubelet gives to the driver's pod")
	}
	pod, err := k.client.Pod(ctx, k.Namespace, name[0])
	switch {
	case apierrors.IsNotFound(err):
		return "", refused("made by pod %s, which is gone", name[0])
	case err != nil:
		return "", fmt.Errorf("reading pods/%s: %w", name[0], err)
	case pod.Metadata.UID != uid[0]:
		return "", refused("made by a pod %s of UID %s, which is gone: now it is %s", name[0], uid[0], pod.Metadata.UID)
	case pod.Status.Phase == "Succeeded" || pod.Status.Phase == "Failed":
		return "", refused("made by pod %s, which has ended: %s", name[0], pod.Status.Phase)
	case pod.Spec.NodeName == "":
		return "", refused("made by pod %s, which is on no node", name[0])
	}
	return pod.Spec.NodeName, nil
}

func (k *keeper) sign(ctx context.Context, ca *pki.Authority, r signingRequest, pub crypto.PublicKey, who *url.URL) error {
	if _, is := r.condition(approved); !is {
		var err error
		if r, err = k.condition(ctx, r, "approval", approved, "NodePod", "made by the driver's pod on that node"); err != nil {
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

// refuse denies a request. One that somebody else approved cannot be denied any more;
// it has failed.
func (k *keeper) refuse(ctx context.Context, r signingRequest, why string) error {
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

func (k *keeper) condition(ctx context.Context, r signingRequest, subresource, kind, reason, message string) (signingRequest, error) {
	conditions := append(slices.Clone(r.Status.Conditions), map[string]any{"type": kind, "status": "True", "reason": reason, "message": message})
	return patch[signingRequest](ctx, k.client.api.Resource(signingRequests), r.Metadata, map[string]any{"status": map[string]any{"conditions": conditions}}, subresource)
}
