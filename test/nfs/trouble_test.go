//go:build vm

package nfs

import (
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// trouble is a change of an administrator to an export. The server responds all the time.
type trouble struct {
	name string
	// begin changes an export.
	begin func(t *testing.T, s *nfsd.Server, export string)
	// end undoes the change; nil: it cannot be undone.
	end func(t *testing.T, s *nfsd.Server, export string)
	// create and says are the code and texts of the result of CreateVolume.
	create codes.Code
	says   []string
	// reads: published volumes can still be read. healthy: health reports no problem.
	reads, healthy bool
}

var troubles = []trouble{
	{
		name:   "unexported",
		begin:  func(t *testing.T, s *nfsd.Server, export string) { s.Unexport(t, export) },
		end:    exportedAgain,
		create: codes.Unavailable, says: []string{"no such directory", "export"},
	},
	{
		name: "replaced",
		begin: func(t *testing.T, s *nfsd.Server, export string) {
			must(t, os.RemoveAll(s.Dir(export)))
			exported(t, s, export)
		},
		create: codes.Unavailable, says: []string{"uuid"},
	},
	{
		name: "covered",
		begin: func(t *testing.T, s *nfsd.Server, export string) {
			s.Unexport(t, export)
			testenv.Run(t, "mount", "--bind", t.TempDir(), s.Dir(export))
			exported(t, s, export)
		},
		end: func(t *testing.T, s *nfsd.Server, export string) {
			s.Unexport(t, export)
			testenv.Run(t, "umount", "--lazy", s.Dir(export)) // the server may still have files open
			exported(t, s, export)
		},
		create: codes.Unavailable, says: []string{"uuid"},
	},
	{
		name:   "readonly",
		begin:  func(t *testing.T, s *nfsd.Server, export string) { exported(t, s, export, "ro") },
		end:    exportedAgain,
		create: codes.FailedPrecondition, says: []string{"read-only", "rw"}, reads: true, healthy: true,
	},
	{
		name:   "squashed",
		begin:  func(t *testing.T, s *nfsd.Server, export string) { exported(t, s, export, "root_squash") },
		end:    exportedAgain,
		create: codes.Unavailable, says: []string{"no_root_squash"}, reads: true,
	},
}

func exported(t *testing.T, s *nfsd.Server, export string, options ...string) {
	s.Export(t, strings.TrimPrefix(export, "/"), options...)
}

func exportedAgain(t *testing.T, s *nfsd.Server, export string) { exported(t, s, export) }

// TestTrouble changes exports while the driver uses them, each the export of one pool.
func TestTrouble(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	pools := nfsPool("untouched", s, s.Export(t, "untouched"))
	for _, tr := range troubles {
		pools += nfsPool(tr.name, s, s.Export(t, tr.name))
	}
	m := start(t, s.Node(t, "node-1"), "node-1", pools)
	eventually(t, func() error { return m.tryDirectory(t, "untouched", "first") })
	beside := m.image(t, "untouched", "beside", "ext4", 64*mib)
	m.up(t, beside)
	w := startWriter(t, m.file(beside, "records"))
	for _, tr := range troubles {
		t.Run(tr.name, func(t *testing.T) { tr.run(t, m, s) })
		w.awaitProgress(t)
	}
	w.finish(t)
	m.remove(t, beside)
	must(t, m.delete(t, m.directory(t, "untouched", "first")))
}

func (tr trouble) run(t *testing.T, m *machine, s *nfsd.Server) {
	eventually(t, func() error { return m.tryDirectory(t, tr.name, tr.name+"-spare") }) // the pool may not be open yet
	directory, image := m.directory(t, tr.name, tr.name+"-directory"), m.image(t, tr.name, tr.name+"-image", "ext4", 64*mib)
	spare := m.directory(t, tr.name, tr.name+"-spare")
	m.up(t, directory)
	m.up(t, image)
	write(t, m.file(directory, "file"), "kept")
	write(t, m.file(image, "file"), "kept")

	export := "/" + tr.name
	tr.begin(t, s, export)
	wantCode(t, soon(t, func() error { return m.tryDirectory(t, tr.name, "made-in-trouble") }, tr.create, tr.says...), tr.create, tr.says...)
	err := m.delete(t, spare)
	t.Logf("delete: %v", err)
	if code := status.Code(err); code != tr.create {
		t.Errorf("delete: got %v, want %v", err, tr.create)
	}
	t.Logf("stage: %v", m.stage(t, spare))
	got, err := os.ReadFile(m.file(directory, "file"))
	t.Logf("read: %q, %v", got, err)
	if tr.reads != (err == nil) {
		t.Errorf("reading: %v", err)
	}
	for _, v := range []*vol{directory, image} {
		reasons := m.health(t, v)
		t.Logf("health of %s: %q", v.name, reasons)
		// An image that cannot be written may also be one that cannot be read.
		if healthy := len(reasons) == 0; healthy != tr.healthy && (v == directory || healthy) {
			t.Errorf("health of %s: got %q", v.name, reasons)
		}
	}
	if tr.end == nil {
		tr.leave(t, m, directory, image)
		return
	}
	tr.end(t, s, export)
	eventually(t, func() error { return m.tryDirectory(t, tr.name, "made-after") })
	wantText(t, m.file(directory, "file"), "kept")
	write(t, m.file(image, "file"), "kept")
	m.down(t, directory)
	m.down(t, image)
	must(t, m.unstage(t, spare))
	for _, v := range []*vol{directory, image, spare, m.directory(t, tr.name, "made-after")} {
		eventually(t, func() error { return m.delete(t, v) })
	}
}

// leave takes down volumes whose export no longer exists.
func (tr trouble) leave(t *testing.T, m *machine, volumes ...*vol) {
	t.Helper()
	for _, v := range volumes {
		must(t, m.unpublish(t, v))
		if err := m.unstage(t, v); err != nil {
			t.Errorf("unstage of %s after its export was replaced: %v", v.name, err)
		}
	}
}

// soon repeats a call until its result is as expected, because attributes are cached for a moment.
func soon(t *testing.T, do func() error, code codes.Code, says ...string) (err error) {
	t.Helper()
	for end := time.Now().Add(patience / 4); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		err = do()
		ok := status.Code(err) == code
		for _, text := range says {
			ok = ok && err != nil && strings.Contains(err.Error(), text)
		}
		if ok {
			break
		}
	}
	t.Logf("create: %v", err)
	return err
}
