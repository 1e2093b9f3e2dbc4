package backendtest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// Check requests the driver to check a volume, and returns the result.
func (d *Driver) Check(tb testing.TB, id string) driver.CheckResult {
	tb.Helper()
	results, err := driver.Check(tb.Context(), d.conn, driver.CheckRequest{Volumes: []string{id}})
	if err != nil {
		tb.Fatal(err)
	}
	if len(results) != 1 || results[0].ID != id {
		tb.Fatalf("got results %+v, want one of %s", results, id)
	}
	return results[0]
}

// testCheck: the filesystem of a volume is checked while a program writes to it, and is clean. A volume that cannot be copied while
// it is in use, or whose content the driver does not know, is refused. Damage is reported.
func testCheck(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	if !kind.Has(Image) && !kind.Has(Thin) || kind.Has(Encrypted) || !kind.Has(Filesystem) || kind.Has(FullCopies) {
		if r := d.Check(t, l.id); r.Result != driver.CheckFailed || r.Problem == "" || r.Errors != "" {
			t.Errorf("got result %+v of a volume that cannot be checked, want a problem", r)
		}
		return
	}
	stop := writeUntil(t, l.target)
	first := d.Check(t, l.id)
	second := d.Check(t, l.id)
	stop()
	if first.Result != driver.CheckClean || first.Problem != "" || !first.LastCheck.IsZero() {
		t.Errorf("got result %+v of a volume in use, want clean, and no earlier check", first)
	}
	if second.Result != driver.CheckClean || !second.LastCheck.Equal(first.Began) || second.LastResult != driver.CheckClean {
		t.Errorf("got result %+v of the second check, want clean, and that of the first at %v", second, first.Began)
	}
	content := pattern(90)
	write(t, l.data(l.target), content)
	must(t, l.unpublishAt(t.Context(), l.target))
	must(t, l.unstage(t.Context()))
	if r := d.Check(t, l.id); r.Result != driver.CheckClean {
		t.Errorf("got result %+v of a volume that is not staged, want clean", r)
	}
	var want string
	switch kind.FSType {
	case "ext4":
		want = "ref count is 9"
		l.withImage(t, func(path string) { testenv.Run(t, "debugfs", "-w", "-R", "set_inode_field <2> links_count 9", path) })
	case "btrfs":
		want = "expected csum"
		l.withImage(t, func(path string) { damageBlock(t, path, content[:btrfsBlock]) })
	default:
		return
	}
	if r := d.Check(t, l.id); r.Result != driver.CheckDamaged || !strings.Contains(r.Errors, want) {
		t.Errorf("got result %+v of a damaged filesystem, want damage with %q", r, want)
	}
}

// btrfsBlock is the size of a block of btrfs in bytes.
const btrfsBlock = 4096

// damageBlock changes the block of an image or a device that has some content.
func damageBlock(t *testing.T, path string, content []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	block := make([]byte, len(content))
	for at := int64(0); ; at += int64(len(block)) {
		_, err := f.ReadAt(block, at)
		must(t, err)
		if bytes.Equal(block, content) {
			block[0]++
			_, err := f.WriteAt(block, at)
			must(t, err)
			must(t, f.Sync())
			return
		}
	}
}

// writeUntil creates, syncs and removes files in a directory until stop is called. One of them stays open after it was removed.
func writeUntil(t *testing.T, dir string) (stop func()) {
	t.Helper()
	deleted, err := os.Create(filepath.Join(dir, "deleted"))
	must(t, err)
	_, err = deleted.WriteString(strings.Repeat("deleted", 1<<17))
	must(t, err)
	must(t, os.Remove(deleted.Name()))
	var writer sync.WaitGroup
	stopped := make(chan struct{})
	writer.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stopped:
				return
			default:
			}
			if err := writeFile(filepath.Join(dir, fmt.Sprint("file-", i%100)), i); err != nil {
				t.Error(err)
				return
			}
		}
	})
	return func() {
		close(stopped)
		writer.Wait()
		must(t, deleted.Close())
	}
}

// writeFile replaces a file by one whose size depends on i, and syncs it.
func writeFile(path string, i int) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(strings.Repeat("content", i%20000)); err != nil {
		return err
	}
	return f.Sync()
}
