package volumemanager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestCommands checks the output of the commands wait and status, for a ready pod and for a pod with
// failing volumes.
func TestCommands(t *testing.T) {
	m := newMachine(t)
	d := newScriptedDriver(m, "hangs.example")
	d.publish = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
	d.start()
	m.put("driver", driverObject("hangs.example"))
	m.put("stuck", podOf("stuck", inlineOf("hangs"), "{name: config, configMap: {name: none}}"))
	m.put("web", podWith("web", "containers: [{name: main, image: none, volumeMounts: [{name: dir, mountPath: /x, subPath: part}]}]", "{name: dir, emptyDir: {}}"))

	p := m.await("web")
	for _, words := range [][]string{{"web"}, {"--timeout", "1m", "default/web"}, {"web", "--timeout", "1m"}} {
		out := m.output(append([]string{"wait"}, words...)...)
		if got, want := strings.Fields(out), []string{"dir", p["dir"].Path, "dir/part", p["dir"].SubPaths[0].Path}; !slices.Equal(got, want) {
			t.Errorf("wait %q: got %q, want %q", words, got, want)
		}
	}
	var ready volumemanager.PodStatus
	must(t, decode(m.output("wait", "web", "-o", "json"), &ready))
	if !ready.Known || !ready.Ready || len(ready.Volumes) != 1 {
		t.Errorf("wait -o json: got %+v, want a known and ready pod with one volume", ready)
	}

	m.awaitVolume("stuck", "hangs", state.Mounting, "")
	m.awaitVolume("stuck", "config", state.Failed, "add it")
	m.checkWaitFails("pod default/stuck is not ready", "stuck", "--timeout", "1ms")
	m.checkWaitFails("hangs is Mounting: for ", "stuck", "--timeout", "1ms")
	m.checkWaitFails("config is Failed: configMap: ConfigMap default/none: no manifest has it: add it", "stuck", "--timeout", "1ms")
	m.checkWaitFails("pod other/web: no manifest has it", "other/web", "--timeout", "1ms")

	m.checkTables(p["dir"].Path)
	var s volumemanager.Status
	text := m.output("status", "-o", "json")
	must(t, decode(text, &s))
	if s.Node != nodeName || !s.Complete || len(s.Volumes) != 3 || len(s.Drivers) != 1 || strings.Contains(text, "null") {
		t.Errorf("status -o json: got this, want node %s, complete, 3 volumes, 1 driver and no null:\n%s", nodeName, text)
	}
	m.awaitWarning("pod default/stuck", "FailedMount", "ConfigMap default/none: no manifest has it: add it")
	d.stop() // cancels the hanging call
	d.set(mountTmpfs)
	d.start()
	m.removeAll()
}

// command returns a command of trivet volume-manager.
func (m *machine) command(words ...string) *exec.Cmd {
	return exec.Command(program, append([]string{"volume-manager", words[0], "--root-dir", m.root}, words[1:]...)...)
}

// output runs a command that must succeed.
func (m *machine) output(words ...string) string {
	m.t.Helper()
	out, err := m.command(words...).Output()
	if err != nil {
		m.t.Errorf("trivet volume-manager %q: got error %v, want none", words, err)
	}
	return string(out)
}

// decode parses JSON. It fails for fields that the type of to does not have.
func decode(text string, to any) error {
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	return d.Decode(to)
}

// checkWaitFails runs wait, which must exit with status 1, print a reason, and print no path.
func (m *machine) checkWaitFails(reason string, words ...string) {
	m.t.Helper()
	out, err := m.command(append([]string{"wait"}, words...)...).Output()
	exit, _ := errors.AsType[*exec.ExitError](err)
	if exit == nil || exit.ExitCode() != 1 || len(out) > 0 || !strings.Contains(string(exit.Stderr), reason) {
		m.t.Errorf("wait %q: got %v, output %q, %+v; want status 1, no output, and the error %q", words, err, out, exit, reason)
	}
}

// checkTables checks the tables of the command status. path is the path of the volume of pod web.
func (m *machine) checkTables(path string) {
	m.t.Helper()
	out := m.output("status")
	for _, want := range [][]string{
		{"POD", "VOLUME", "PLUGIN", "PHASE", "PATH", "MESSAGE"},
		{"default/web", "dir", "kubernetes.io/empty-dir", "Mounted", path},
		{"default/stuck", "hangs", "kubernetes.io/csi", "Mounting", "for "},
		{"DRIVER", "SOCKET", "NODE", "MESSAGE"},
		{"hangs.example", nodeName},
		{"TIME", "OBJECT", "REASON", "COUNT", "MESSAGE"},
		{"pod default/stuck", "FailedMount", "volume config: configMap: ConfigMap default/none"},
	} {
		if !hasLine(out, want) {
			m.t.Errorf("status: got these lines, want one with %q:\n%s", want, out)
		}
	}
}

// hasLine reports whether a line of text contains the words in this order.
func hasLine(text string, words []string) bool {
	return slices.ContainsFunc(strings.Split(text, "\n"), func(line string) bool {
		for _, word := range words {
			_, after, found := strings.Cut(line, word)
			if !found {
				return false
			}
			line = after
		}
		return true
	})
}

// awaitWarning waits until the status contains a warning.
func (m *machine) awaitWarning(object, reason, message string) {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, e := range s.Events {
			if e.Object == object && e.Reason == reason && e.Warning && e.Count > 0 && !e.Time.IsZero() && strings.Contains(e.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("got events %+v, want warning %s of %s with message %q", s.Events, reason, object, message)
	})
}
