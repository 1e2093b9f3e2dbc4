//go:build e2e

package e2e

import (
	"context"
	"os/exec"
	"testing"

	"github.com/trivet-csi/trivet/test/docs"
)

// TestDocumentation runs the commands of README.md and docs/ that need a cluster, unmodified. The driver is
// not installed before the first session.
func TestDocumentation(t *testing.T) {
	const root = "../.."
	commands, err := docs.Commands(root)
	must(t, err)
	kubectl(t, "delete", "-f", manifests, "--ignore-not-found", "--timeout=3m")
	t.Cleanup(func() {
		_, _ = try(context.Background(), "helm", "uninstall", "trivet", "-n", namespace, "--wait") // a failed session may have left the release
		kubectlLast(t, "apply", "--server-side", "-f", manifests)
	})
	for _, s := range docs.Cluster {
		done := t.Run(s.Name, func(t *testing.T) {
			script, err := s.Script(commands)
			must(t, err)
			cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
			cmd.Dir = root
			out, err := cmd.CombinedOutput()
			if err != nil {
				describe(t, "default")
				t.Errorf("%v:\n%s", err, out)
			}
		})
		if !done {
			return // the next session would find the driver of the failed one
		}
	}
	waitDriver(t)
	checkNothingLeft(t)
}
