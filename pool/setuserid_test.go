package pool_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestSetUserIDProgram: a user of the node cannot run a set-user-ID program of a tenant, even if the
// pool's directory was accessible to all users before.
func TestSetUserIDProgram(t *testing.T) {
	e := newEnv(t)
	e.cfg.Directory.Path = testenv.Filesystem(t, "ext4", "64M")
	makeAccessible(t, e.cfg.Directory.Path)
	p := e.open(t)
	program, err := exec.LookPath("id")
	must(t, err)
	content, err := os.ReadFile(program)
	must(t, err)
	for name, subDir := range map[string]string{"own": "", "top": "claim", "below": "team/claim"} {
		v := directory(p, name, subDir, volume.OnDeleteDelete)
		v.ID = p.ID("local", name)
		must(t, p.CreateDirectory(t.Context(), v, nil, open777))
		dir := filepath.Join(e.cfg.Directory.Path, pool.DirectoryPath(v))
		must(t, os.WriteFile(filepath.Join(dir, "id"), content, 0o755))
		must(t, os.Chmod(filepath.Join(dir, "id"), 0o755|os.ModeSetuid))
		c := exec.CommandContext(t.Context(), filepath.Join(dir, "id"), "-u")
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if out, err := c.CombinedOutput(); !errors.Is(err, unix.EACCES) {
			t.Errorf("subDir %q: user 65534 ran the program: got %v and output %q, want EACCES", subDir, err, out)
		}
	}
	if info, err := os.Stat(filepath.Join(e.cfg.Directory.Path, "team")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode of the directory above a subDir: got %v, %v; want 0700", info.Mode(), err)
	}
}

// makeAccessible gives all users access to a directory and its ancestors.
func makeAccessible(t *testing.T, dir string) {
	t.Helper()
	for at := dir; at != "/"; at = filepath.Dir(at) {
		info, err := os.Stat(at)
		must(t, err)
		must(t, os.Chmod(at, info.Mode()|0o011))
	}
}
