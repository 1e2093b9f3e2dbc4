//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	plugins "github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
)

// installPlugin installs a binary of the driver, in the state directory of the cluster, as the plugin of kubectl. It returns a
// function that prepares a call of `kubectl trivet`.
func installPlugin(t *testing.T, binary string) func(ctx context.Context, args ...string) *exec.Cmd {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"kubectl-trivet", "kubectl_complete-trivet"} {
		must(t, os.Symlink(filepath.Join(os.Getenv("TRIVET_E2E_STATE"), binary), filepath.Join(dir, name)))
	}
	return func(ctx context.Context, args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "kubectl", append([]string{"trivet"}, args...)...)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		return cmd
	}
}

// TestPlugin runs each command of `kubectl trivet` while a pod uses a volume. The volume then loses its claim and its
// PersistentVolume, and the command that `orphans` prints deletes it.
func TestPlugin(t *testing.T) {
	ns := newNamespace(t, "plugin")
	plugin := installPlugin(t, "trivet")
	startPod(t, ns, claimPod{name: "data"})
	volume := volumeOf(t, ns, "data")
	handle := kubectl(t, "get", "pv", volume, "-o", "jsonpath={.spec.csi.volumeHandle}")
	node := nodeOf(t, ns, "data")

	t.Run("status", func(t *testing.T) {
		var s struct {
			Drivers []struct {
				Node, Version, Problem string
				Ready, Controller      bool
				Images                 map[string]string
			}
			Pools []status.Pool
		}
		readJSON(t, plugin(t.Context(), "status", "-o", "json"), &s)
		for _, d := range s.Drivers {
			if !d.Ready || d.Problem != "" || d.Images["trivet"] == "" || d.Version == "" {
				t.Errorf("got driver %+v, want it ready, with a version", d)
			}
		}
		if len(s.Drivers) < len(nodes())+1 || len(s.Pools) != len(nodes()) {
			t.Errorf("got %d drivers and pools %+v, want a driver for each node and the controller, and a pool for each node", len(s.Drivers), s.Pools)
		}
		if table := output(t, plugin(t.Context(), "status")); !strings.Contains(table, node) || !strings.Contains(table, "controller") || !strings.Contains(table, "[#") {
			t.Errorf("got the table\n%s\nwant the controller, %s and the bars of pools", table, node)
		}
	})
	t.Run("volumes", func(t *testing.T) {
		v := ownVolume(t, plugin, handle)
		if v.Claim != ns+"/data" || v.PersistentVolume != volume || !slices.Equal(v.Pods, []string{ns + "/data"}) || v.Node != node || v.UsedBytes <= 0 || len(v.Health) != 0 || v.IO == nil {
			t.Errorf("got %+v, want the claim and pod data on %s, without problems", v, node)
		}
	})
	t.Run("top", func(t *testing.T) {
		var top struct{ Volumes []plugins.VolumeRate }
		writing := make(chan struct{})
		go func() {
			defer close(writing)
			_, _ = try(t.Context(), "kubectl", "-n", ns, "exec", "data", "--", "sh", "-c", "for i in 1 2 3 4 5 6; do dd if=/dev/zero of=/data/file bs=64k count=16; sync; sleep 1; done")
		}()
		readJSON(t, plugin(t.Context(), "top", "--interval", "3s", "-o", "json"), &top)
		<-writing
		i := slices.IndexFunc(top.Volumes, func(v plugins.VolumeRate) bool { return v.ID == handle })
		if i < 0 || top.Volumes[i].WrittenBytes == 0 {
			t.Errorf("got the rates %+v, want that of %s, to which a pod writes", top.Volumes, handle)
		}
	})
	t.Run("doctor", func(t *testing.T) {
		var checks []struct{ Driver, Name, Result, Seen string }
		readJSON(t, plugin(t.Context(), "doctor", "-o", "json"), &checks)
		drivers := map[string]int{}
		for _, c := range checks {
			drivers[c.Driver]++
			if c.Result == "failure" {
				t.Errorf("got the failure %+v, want none", c)
			}
		}
		for _, want := range []string{"controller", node} {
			if drivers[want] == 0 {
				t.Errorf("got checks of %v, want some of %s", drivers, want)
			}
		}
	})
	t.Run("logs", func(t *testing.T) {
		if log := output(t, plugin(t.Context(), "logs", "--node", node, "--since", "10m")); !strings.HasPrefix(log, node+": ") || !strings.Contains(log, "NodeStageVolume") {
			t.Errorf("got the log\n%s\nwant that of %s with NodeStageVolume", tail(log, 20), node)
		}
	})
	t.Run("completion", func(t *testing.T) {
		cmd := plugin(t.Context(), "logs", "--node", "")
		cmd.Args = slices.Insert(cmd.Args, 1, "__complete") // the command with which the shell asks kubectl
		if words := strings.Fields(output(t, cmd)); !slices.Contains(words, node) {
			t.Errorf("got completions %q for --node, want %s", words, node)
		}
	})
	t.Run("ui", func(t *testing.T) { checkPage(t, plugin, volume, ns+"/data") })
	t.Run("without rights", func(t *testing.T) {
		out, err := plugin(t.Context(), "status", "--as", "nobody").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "needs the right to list pods") {
			t.Errorf("got %v and %s, want an error that names the missing right", err, out)
		}
	})
	t.Run("orphans", func(t *testing.T) { checkOrphan(t, plugin, ns, volume, handle) })
}

// ownVolume returns the volume with a handle as `kubectl trivet volumes` shows it.
func ownVolume(t *testing.T, plugin func(context.Context, ...string) *exec.Cmd, handle string) plugins.Volume {
	t.Helper()
	var all []plugins.Volume
	readJSON(t, plugin(t.Context(), "volumes", "-o", "json"), &all)
	i := slices.IndexFunc(all, func(v plugins.Volume) bool { return v.ID == handle })
	if i < 0 {
		t.Fatalf("got volumes %+v, want %s", all, handle)
	}
	return all[i]
}

// checkPage: `kubectl trivet ui` serves the status page, which shows a volume with its claim.
func checkPage(t *testing.T, plugin func(context.Context, ...string) *exec.Cmd, volume, claim string) {
	cmd := plugin(t.Context(), "ui", "--open=false")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			t.Errorf("after an interrupt: %v", err)
		}
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	_, after, _ := strings.Cut(line, "http://")
	address, _, _ := strings.Cut(after, " ")
	resp, err := http.Get("http://" + address)
	must(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	must(t, err)
	if resp.StatusCode != http.StatusOK || !bytes.Contains(page, []byte(volume)) || !bytes.Contains(page, []byte(claim)) {
		t.Errorf("got %s and a page without %s and %s:\n%s", resp.Status, volume, claim, page)
	}
}

// checkOrphan removes the pod, the claim and the PersistentVolume of a volume, but keeps the volume. It is then an
// orphan, and the printed command deletes it.
func checkOrphan(t *testing.T, plugin func(context.Context, ...string) *exec.Cmd, ns, volume, handle string) {
	if o, found := findOrphan(t, plugin, handle); found {
		t.Fatalf("got the orphan %+v while the volume has a PersistentVolume", o)
	}
	kubectl(t, "patch", "pv", volume, "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
	kubectl(t, "-n", ns, "delete", "pod,pvc", "data", "--timeout=2m")
	eventually(t, 2*time.Minute, "the volume is detached", func() (string, bool) {
		left := kubectl(t, "get", "volumeattachment", "-o", "name")
		return left, left == ""
	})
	kubectl(t, "delete", "pv", volume, "--timeout=2m")
	deleteOrphan(t, plugin, handle)
}

// findOrphan returns the orphan with a name that `kubectl trivet orphans` lists.
func findOrphan(t *testing.T, plugin func(context.Context, ...string) *exec.Cmd, name string) (o plugins.Orphan, found bool) {
	t.Helper()
	var all []plugins.Orphan
	readJSON(t, plugin(t.Context(), "orphans", "-o", "json"), &all)
	i := slices.IndexFunc(all, func(o plugins.Orphan) bool { return o.Name == name })
	if i < 0 {
		return o, false
	}
	return all[i], true
}

// deleteOrphan deletes an orphaned volume with the command that `kubectl trivet orphans` prints.
func deleteOrphan(t *testing.T, plugin func(context.Context, ...string) *exec.Cmd, handle string) {
	t.Helper()
	o, found := findOrphan(t, plugin, handle)
	if !found || o.Kind != plugins.OrphanedVolume {
		t.Fatalf("got %+v, want the orphaned volume %s", o, handle)
	}
	clean := exec.CommandContext(t.Context(), "sh", "-c", o.CleanUp)
	clean.Env = plugin(t.Context()).Env
	if out, err := clean.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", o.CleanUp, err, out)
	}
	eventually(t, 2*time.Minute, "the orphan is deleted", func() (string, bool) {
		o, found := findOrphan(t, plugin, handle)
		return fmt.Sprintf("%+v", o), !found
	})
}

// readJSON runs a command and parses its output as JSON.
func readJSON(t *testing.T, cmd *exec.Cmd, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(output(t, cmd)), into); err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
}

// output runs a command, which must succeed, and returns its output.
func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v: %s%s", cmd, err, out, stderr.String())
	}
	return string(out)
}
