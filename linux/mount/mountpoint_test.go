package mount_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestIsMountPoint: mounted directories and files are mount points. A symbolic link to a mount point and a
// path below one are not.
func TestIsMountPoint(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	for _, name := range []string{"plain", "mounted"} {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o700))
	}
	for _, name := range []string{"file", "mounted-file"} {
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	must(t, os.Symlink("mounted", filepath.Join(dir, "link")))
	must(t, os.Mkdir(filepath.Join(dir, "plain/below"), 0o700))
	for from, to := range map[string]string{"plain": "mounted", "file": "mounted-file"} {
		at := filepath.Join(dir, to)
		must(t, mount.Bind(filepath.Join(dir, from), at, mount.Options{}))
		t.Cleanup(func() { must(t, mount.Unmount(at)) })
	}
	for name, want := range map[string]bool{
		"plain": false, "file": false, "mounted": true, "mounted-file": true, "link": false,
		"mounted/below": false, "missing": false, "missing/below": false, "file/below": false,
	} {
		if is, err := mount.IsMountPoint(filepath.Join(dir, name)); is != want || err != nil {
			t.Errorf("%s: got %t, %v, want %t", name, is, err, want)
		}
	}
}
