package backendtest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// Trim requests the driver to trim volumes, and returns the results.
func (d *Driver) Trim(tb testing.TB, r driver.TrimRequest) []driver.TrimResult {
	tb.Helper()
	results, err := driver.Trim(tb.Context(), d.conn, r)
	if err != nil {
		tb.Fatal(err)
	}
	return results
}

// trim trims one volume.
func (l *testVolume) trim(t *testing.T) driver.TrimResult {
	t.Helper()
	results := l.d.Trim(t, driver.TrimRequest{Volumes: []string{l.id}})
	if len(results) != 1 || results[0].ID != l.id {
		t.Fatalf("got results %+v, want one of %s", results, l.id)
	}
	return results[0]
}

// allocated returns the space that the image or the thin volume of a volume takes.
func (l *testVolume) allocated(t *testing.T) int64 {
	t.Helper()
	if l.kind.Has(Image) {
		var st unix.Stat_t
		must(t, unix.Stat(filepath.Join(l.d.Pool(), "volumes", l.name(), "image"), &st))
		return st.Blocks * 512
	}
	percent, err := strconv.ParseFloat(l.d.logicalVolumes(t, "data_percent", "trivet.volume."+l.name())[0], 64)
	must(t, err)
	return int64(percent / 100 * float64(gib))
}

// testTrim: a trim returns the space of deleted files to the pool, also while the volume is published, and does not change
// other files. A volume without space to return, or that is not mounted, is refused.
func testTrim(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	if !kind.Has(Image) && !kind.Has(Thin) || kind.Has(Encrypted) || !kind.Has(Filesystem) {
		if r := l.trim(t); r.Problem == "" {
			t.Errorf("got result %+v of a volume without space to return, want a problem", r)
		}
		return
	}
	l.trim(t) // what mkfs has written and freed
	const size = 64 << 20
	kept, deleted := filepath.Join(l.target, "kept"), filepath.Join(l.target, "deleted")
	write(t, kept, pattern(121))
	write(t, deleted, pattern(122))
	testenv.Run(t, "dd", "if=/dev/urandom", "of="+deleted, "bs=1M", "count=64", "conv=fsync", "status=none")
	full := l.allocated(t)
	must(t, os.Remove(deleted))
	testenv.Run(t, "sync", "-f", l.target)
	trimmed := int64(0)
	await(t, "the space to be returned", func() bool { // xfs frees the blocks of a deleted file in the background
		r := l.trim(t)
		if r.Problem != "" {
			t.Fatalf("got result %+v, want no problem", r)
		}
		trimmed += r.TrimmedBytes
		return l.allocated(t) <= full-size+size/10
	})
	if trimmed < size {
		t.Errorf("got %d trimmed bytes, want at least %d", trimmed, size)
	}
	wantContent(t, kept, pattern(121))
	must(t, l.unpublishAt(t.Context(), l.target))
	must(t, l.unstage(t.Context()))
	if r := l.trim(t); !strings.Contains(r.Problem, "stage it first") {
		t.Errorf("got result %+v of a volume that is not mounted, want a problem", r)
	}
}
