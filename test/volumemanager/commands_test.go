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

// TestCommands checks the output of wait and status for a ready pod and for one with failing volumes.
func TestCommands(t *testing.T) {
	g := newGround(t)
	d := newScripted(g, "hangs.example")
	d.publish = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
	d.start()
	g.put("driver", driverObject("hangs.example"))
	g.put("stuck", podOf("stuck", inlineOf("hangs"), "{name: config, configMap: {name: none}}"))
	g.put("web", podWith("web", "containers: [{name: main, image: none, volumeMounts: [{name: dir, mountPath: /x, subPath: part}]}]", "{name: dir, emptyDir: {}}"))

	p := g.await("web")
	for _, words := range [][]string{{"web"}, {"--timeout", "1m", "default/web"}, {"web", "--timeout", "1m"}} {
		out := g.output(append([]string{"wait"}, words...)...)
		if got, want := strings.Fields(out), []string{"dir", p["dir"].Path, "dir/part", p["dir"].SubPaths[0].Path}; !slices.Equal(got, want) {
			t.Errorf("wait %q: %q; want %q", words, got, want)
		}
	}
	var ready volumemanager.PodStatus
	must(t, decode(g.output("wait", "web", "-o", "json"), &ready))
	if !ready.Known || !ready.Ready || len(ready.Volumes) != 1 {
		t.Errorf("wait -o json: %+v", ready)
	}

	g.says("stuck", "hangs", state.Mounting, "")
	g.says("stuck", "config", state.Failed, "add one")
	g.refuses("pod default/stuck is not ready", "stuck", "--timeout", "1ms")
	g.refuses("hangs is Mounting: for ", "stuck", "--timeout", "1ms")
	g.refuses("config is Failed: configMap: ConfigMap default/none: no manifest has it: add one", "stuck", "--timeout", "1ms")
	g.refuses("pod other/web: no manifest has it", "other/web", "--timeout", "1ms")

	g.tables(p["dir"].Path)
	var s volumemanager.Status
	text := g.output("status", "-o", "json")
	must(t, decode(text, &s))
	if s.Node != nodeName || !s.Complete || len(s.Volumes) != 3 || len(s.Drivers) != 1 || strings.Contains(text, "null") {
		t.Errorf("status -o json: %s", text)
	}
	g.warned("pod default/stuck", "FailedMount", "ConfigMap default/none: no manifest has it: add one")
	d.stop() // cancels the hanging call
	d.set(mountTmpfs)
	d.start()
	g.wantNothing()
}

// command returns a command of trivet volume-manager.
func (g *ground) command(words ...string) *exec.Cmd {
	return exec.Command(program, append([]string{"volume-manager", words[0], "--root-dir", g.root}, words[1:]...)...)
}

// output runs a command that must succeed.
func (g *ground) output(words ...string) string {
	g.t.Helper()
	out, err := g.command(words...).Output()
	if err != nil {
		g.t.Errorf("%q: %v", words, err)
	}
	return string(out)
}

func decode(text string, to any) error {
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	return d.Decode(to)
}

// refuses runs wait, which must exit with status 1 and a reason, and print no path.
func (g *ground) refuses(reason string, words ...string) {
	g.t.Helper()
	out, err := g.command(append([]string{"wait"}, words...)...).Output()
	ended, _ := errors.AsType[*exec.ExitError](err)
	if ended == nil || ended.ExitCode() != 1 || len(out) > 0 || !strings.Contains(string(ended.Stderr), reason) {
		g.t.Errorf("wait %q: %v, %s, %+v; want status 1 and %q", words, err, out, ended, reason)
	}
}

// tables checks the tables of status. Pod web has a volume at a path.
func (g *ground) tables(path string) {
	g.t.Helper()
	out := g.output("status")
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
			g.t.Errorf("status has no line of %q:\n%s", want, out)
		}
	}
}

// hasLine reports whether a line of a text contains words in this order.
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

// warned waits until a warning is in the status.
func (g *ground) warned(object, reason, message string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, e := range s.Events {
			if e.Object == object && e.Reason == reason && e.Warning && e.Count > 0 && !e.Time.IsZero() && strings.Contains(e.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("no event %s of %s with message %q: %+v", reason, object, message, s.Events)
	})
}
