//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	startupTaint = driverName + "/agent-not-ready"
	nodeAccount  = "trivet-node"
)

// TestNodeRights checks that the token of a node's driver can only remove the startup taint of its own Node,
// and can change no other Node.
func TestNodeRights(t *testing.T) {
	ensureInstalled(t)
	pod, err := client.CoreV1().Pods(namespace).Get(t.Context(), driverPods(t, nodePods)[0], metav1.GetOptions{})
	must(t, err)
	own, other := pod.Spec.NodeName, ""
	for _, n := range nodes() {
		if n.name != own {
			other = n.name
		}
		t.Cleanup(func() { resetNode(t, n.name) })
		// The running drivers do not remove the taint, because they check for it only when they start.
		kubectl(t, "taint", "node", n.name, startupTaint+"=:PreferNoSchedule", "example.com/other=kept:PreferNoSchedule")
		kubectl(t, "label", "node", n.name, "example.com/kept=yes")
	}
	driver := clientWithToken(t, token(t, nodeAccount, pod))
	// The API server enforces a new policy only after a moment.
	eventually(t, 30*time.Second, "the admission policy is enforced", func() (string, bool) {
		err := tryPatch(t, driver, own, taints())
		return fmt.Sprint(err), apierrors.IsForbidden(err)
	})

	for name, patch := range map[string]string{
		"label":                  `{"metadata": {"labels": {"example.com/stolen": "yes"}}}`,
		"existing label":         `{"metadata": {"labels": {"example.com/kept": null}}}`,
		"annotation":             `{"metadata": {"annotations": {"example.com/stolen": "yes"}}}`,
		"finalizer":              `{"metadata": {"finalizers": ["example.com/stolen"]}}`,
		"owner":                  `{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": "x"}]}}`,
		"unschedulable":          `{"spec": {"unschedulable": true}}`,
		"provider":               `{"spec": {"providerID": "stolen://x"}}`,
		"status":                 `{"status": {"phase": "Terminated"}}`,
		"taint added":            taints("example.com/other", startupTaint, "example.com/stolen"),
		"another taint removed":  taints(startupTaint),
		"both taints removed":    taints(),
		"taint and label":        `{"metadata": {"labels": {"example.com/stolen": "yes"}}, ` + strings.TrimPrefix(taints("example.com/other"), "{"),
		"taint in another order": taints(startupTaint, "example.com/other"),
	} {
		expectDenied(t, name, tryPatch(t, driver, own, patch))
	}
	expectDenied(t, "status subresource", tryPatch(t, driver, own, `{"status": {"phase": "Terminated"}}`, "status"))

	removal := taints("example.com/other")
	expectDenied(t, "startup taint of another node", tryPatch(t, driver, other, removal))
	expectDenied(t, "token that is not bound to a node", tryPatch(t, clientWithToken(t, token(t, nodeAccount, nil)), own, removal))
	if _, err := driver.CoreV1().Nodes().Patch(t.Context(), own, types.MergePatchType, []byte(removal), metav1.PatchOptions{}); err != nil {
		t.Errorf("removing the node's own startup taint: got error %v, want success", err)
	}
	if have := kubectl(t, "get", "node", own, "-o", "jsonpath={.spec.taints[*].key} {.metadata.labels.example\\.com/kept}"); have != "example.com/other yes" {
		t.Errorf("got taints and label %q, want %q", have, "example.com/other yes")
	}
	// The policy does not restrict other users.
	kubectl(t, "label", "node", other, "example.com/administrator=yes")
}

// taints returns a patch after which a Node has exactly the given taints.
func taints(keys ...string) string {
	list := []corev1.Taint{}
	for _, key := range keys {
		taint := corev1.Taint{Key: key, Effect: corev1.TaintEffectPreferNoSchedule}
		if key == "example.com/other" {
			taint.Value = "kept"
		}
		list = append(list, taint)
	}
	text, _ := json.Marshal(map[string]any{"spec": map[string]any{"taints": list}})
	return string(text)
}

// token returns a token of a ServiceAccount, bound to a pod like the tokens that the kubelet requests. If pod
// is nil, the token is not bound.
func token(t *testing.T, account string, pod *corev1.Pod) string {
	t.Helper()
	request := &authenticationv1.TokenRequest{}
	if pod != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	}
	answer, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	must(t, err)
	return answer.Status.Token
}

// clientWithToken returns a Kubernetes client that authenticates with a token.
func clientWithToken(t *testing.T, token string) kubernetes.Interface {
	t.Helper()
	config := rest.AnonymousClientConfig(clusterConfig)
	config.BearerToken = token
	c, err := kubernetes.NewForConfig(config)
	must(t, err)
	return c
}

// tryPatch sends a patch of a Node as a dry run and returns the error.
func tryPatch(t *testing.T, c kubernetes.Interface, node, patch string, subresources ...string) error {
	t.Helper()
	// A merge patch replaces the whole list of taints.
	_, err := c.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, subresources...)
	return err
}

// expectDenied fails the test unless err means that a change is forbidden.
func expectDenied(t *testing.T, change string, err error) {
	t.Helper()
	if !apierrors.IsForbidden(err) {
		t.Errorf("%s: got error %v, want forbidden", change, err)
	}
}

// resetNode removes the labels and taints of the test.
func resetNode(t *testing.T, node string) {
	kubectlLast(t, "label", "node", node, "example.com/kept-", "example.com/administrator-")
	kubectlLast(t, "patch", "node", node, "--type=merge", "-p", `{"spec": {"taints": null}}`)
}
