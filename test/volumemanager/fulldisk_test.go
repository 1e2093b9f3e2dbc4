package volumemanager

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestFullDisk: on a full disk, new volumes fail with a message, pods can be removed, and existing
// volumes work.
func TestFullDisk(t *testing.T) {
	g := newGround(t)
	g.manager.kill()
	g.root = testenv.SimpleQuotas(t, "256M")
	t.Cleanup(g.end) // before the disk is removed
	g.startManager()
	g.put("config", settings)
	g.put("early", podOf("early", "{name: secret, secret: {secretName: keys}}", "{name: dir, emptyDir: {}}"))
	early := g.await("early")

	ballast := filepath.Join(g.root, "ballast")
	t.Cleanup(func() { _ = os.Remove(ballast) }) // if the test has failed
	fillUp(t, ballast)
	late := podOf("late", "{name: dir, emptyDir: {sizeLimit: 8Mi}}", "{name: memory, emptyDir: {medium: Memory}}",
		fmt.Sprintf("{name: host, hostPath: {path: %q, type: Directory}}", g.dir))
	g.put("late", late)
	g.says("late", "dir", state.Failed, "no space left on device: make room on the filesystem of "+g.root)
	g.says("late", "host", state.Mounted, "")
	g.says("early", "dir", state.Mounted, "")
	g.put("config", strings.Replace(settings, "s3cret", "changed", 1))
	g.holds(func(volumemanager.Status) error {
		b, err := os.ReadFile(filepath.Join(early["secret"].Path, "password"))
		if err == nil && string(b) != "changed" {
			err = fmt.Errorf("the password is %q", b)
		}
		return err
	})
	g.remove("late")
	g.gone("late")

	g.put("late", late)
	g.says("late", "dir", state.Failed, "make room")
	must(t, os.Remove(ballast))
	g.await("late")
	g.wantNothing()
}

// fillUp fills a disk.
func fillUp(t *testing.T, path string) {
	t.Helper()
	for _, size := range []string{"1M", "4K", "1"} {
		out, err := exec.Command("dd", "if=/dev/zero", "of="+path, "bs="+size, "oflag=append", "conv=notrunc,fsync", "status=none").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "No space left") {
			t.Fatalf("dd: %s, %v", out, err)
		}
	}
}
