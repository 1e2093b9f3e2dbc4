//go:build e2e

package e2e

import (
	"strings"
	"sync"
	"testing"
)

// first makes sure that only one test installs the driver. installed is false if the installation failed.
var first = struct {
	sync.Once
	installed bool
}{}

// ensureInstalled installs the driver unless an earlier test has installed it.
func ensureInstalled(t *testing.T) {
	t.Helper()
	first.Do(func() {
		install(t)
		first.installed = true
	})
	if !first.installed {
		t.Fatal("the installation of the driver failed in an earlier test")
	}
}

// uninstall deletes the manifests. It deletes the pods first: the namespace controller checks a namespace with pods again
// only after a part of their grace period.
func uninstall(t *testing.T) {
	t.Helper()
	kubectl(t, "-n", namespace, "delete", "daemonset,deployment", "--all", "--cascade=foreground", "--timeout=3m")
	kubectl(t, "delete", "-f", manifests, "--ignore-not-found", "--timeout=3m")
}

// TestInstall checks that the driver becomes ready with the unmodified manifests, that the API server accepts them without
// a warning, and that it refuses an unprivileged driver on the nodes, with the error in docs/operations/security.md.
func TestInstall(t *testing.T) {
	ensureInstalled(t)
	out := kubectlInput(t, "", "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", manifests)
	if !strings.Contains(out, "daemonset.apps/trivet-node serverside-applied (server dry run)") || strings.Contains(out, "Warning") {
		t.Error(out)
	}
	const refused = "spec.template.spec.containers[0].volumeMounts.mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged containers"
	out, err := try(t.Context(), "kubectl", "-n", namespace, "patch", "daemonset", "trivet-node", "--dry-run=server", "--patch",
		`{"spec": {"template": {"spec": {"containers": [{"name": "trivet", "securityContext": {"privileged": false}}]}}}}`)
	if err == nil || !strings.Contains(out, refused) {
		t.Errorf("got %v, %q for an unprivileged driver, want the error %q", err, out, refused)
	}
}
