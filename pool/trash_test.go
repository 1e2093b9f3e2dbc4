package pool_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// trashed lists the trash of the pool in the directory path.
func trashed(t *testing.T, path string) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(path, ".trivet", "trash"))
	must(t, err)
	return entries
}

// TestTrashIsRetried: removing an entry is retried while the driver runs, and does not delay other
// entries.
func TestTrashIsRetried(t *testing.T) {
	testenv.RequireRoot(t)
	t.Run("directory pool", func(t *testing.T) {
		e := newEnv(t)
		retryTrash(t, e.open(t), e.cfg.Directory.Path)
	})
	t.Run("export", func(t *testing.T) {
		e := newExport(t)
		retryTrash(t, e.open(t), e.dir)
	})
}

// retryTrash deletes a volume in whose folder a filesystem is mounted. The entry stays in the trash and is
// reported until the filesystem is unmounted, and another volume is removed meanwhile.
func retryTrash(t *testing.T, p *pool.Pool, path string) {
	t.Helper()
	held := add(t, p, "held")
	inside := filepath.Join(path, "volumes", "held", "sub")
	must(t, os.Mkdir(inside, 0o700))
	must(t, unix.Mount("trivet-test", inside, "tmpfs", 0, ""))
	mounted := true
	t.Cleanup(func() {
		if mounted {
			unmountTrashed(t, path)
		}
	})
	must(t, p.Remove(t.Context(), held))
	await(t, "the first attempt to remove the entry to fail", func() bool { return len(p.Trash.Errors()) > 0 })
	wantError(t, p.Trash.Errors()[0], volume.ErrPrecondition, ".trivet/trash/held.", "a filesystem is mounted at this path: unmount it")
	if u := usage(t, p); u.Trash != 1 || u.TrashStuck != 1 {
		t.Errorf("got %d entries in the trash, %d of them stuck; want one, which is stuck", u.Trash, u.TrashStuck)
	}
	must(t, p.Remove(t.Context(), add(t, p, "free")))
	await(t, "the other entry to be removed", func() bool { return len(trashed(t, path)) == 1 })
	unmountTrashed(t, path)
	mounted = false
	await(t, "the entry to be removed", func() bool { return len(trashed(t, path)) == 0 })
	await(t, "the error and the reservation to be removed", func() bool { return len(p.Trash.Errors()) == 0 && usage(t, p).Promised == 0 })
}

// unmountTrashed unmounts the filesystem in the entry of retryTrash.
func unmountTrashed(t *testing.T, path string) {
	t.Helper()
	at, err := filepath.Glob(filepath.Join(path, ".trivet", "trash", "held.*", "sub"))
	must(t, err)
	for _, dir := range at {
		must(t, unix.Unmount(dir, 0))
	}
}

// TestHugeTrash: a small entry is removed while an older huge one is being removed.
func TestHugeTrash(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	huge := add(t, p, "huge")
	dir := filepath.Join(e.cfg.Directory.Path, "volumes", "huge", "files")
	must(t, os.Mkdir(dir, 0o700))
	for i := range 20000 {
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600))
	}
	must(t, p.Remove(t.Context(), huge))
	must(t, p.Remove(t.Context(), add(t, p, "small")))
	var left []os.DirEntry
	await(t, "the small entry to be removed", func() bool {
		left = trashed(t, e.cfg.Directory.Path)
		return len(left) < 2
	})
	if len(left) == 0 || left[0].Name()[:4] != "huge" {
		t.Errorf("after the small entry was removed the trash contains %v, want the huge entry", left)
	}
}
