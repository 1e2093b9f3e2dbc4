//go:build e2e

package e2e

import (
	"context"
	"os"
	"os/exec"
	"testing"

	"github.com/trivet-csi/trivet/test/docs"
)

// TestDocumentation runs the commands of README.md and docs/ that need a cluster, unmodified. The driver is
// not installed before the first session.
func TestDocumentation(t *testing.T) {
	kubectl(t, "delete", "-f", manifests, "--ignore-not-found", "--timeout=3m")
	t.Cleanup(func() {
		_, _ = try(context.Background(), "helm", "uninstall", "trivet", "-n", namespace, "--wait") // a failed session may have left the release
		kubectlLast(t, "apply", "--server-side", "-f", manifests)
	})
	for _, s := range docs.Cluster {
		done := t.Run(s.Name, func(t *testing.T) {
			if out, err := runSession(t, s); err != nil {
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

// runSession runs the commands of a session with more environment variables, and returns their output.
func runSession(t *testing.T, s docs.Session, env ...string) (string, error) {
	t.Helper()
	const root = "../.."
	commands, err := docs.Commands(root)
	must(t, err)
	script, err := s.Script(commands)
	must(t, err)
	cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
	cmd.Dir, cmd.Env = root, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// runPart runs a session of docs.Parts, which must succeed.
func runPart(t *testing.T, name string, env ...string) {
	t.Helper()
	out, err := runSession(t, docs.Parts[name], env...)
	if err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
}
