//go:build e2e

package e2e

import (
	"strings"
	"sync"
	"testing"
)

var first = struct {
	sync.Once
	installed bool
}{}

// installed installs the driver for the first test that needs it.
func installed(t *testing.T) {
	t.Helper()
	first.Do(func() {
		install(t)
		first.installed = true
	})
	if !first.installed {
		t.Fatal("the driver could not be installed")
	}
}

// install applies the rendered manifests as they stand and waits for the driver.
func install(t *testing.T) {
	t.Helper()
	kubectl(t, "apply", "--server-side", "-f", manifests)
	waitDriver(t)
}

// TestInstall: the API server takes the manifests without a warning, and the driver
// is ready with them as they stand.
func TestInstall(t *testing.T) {
	installed(t)
	out := pipe(t, "", "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", manifests)
	if !strings.Contains(out, "daemonset.apps/trivet-node serverside-applied (server dry run)") || strings.Contains(out, "Warning") {
		t.Error(out)
	}
}
