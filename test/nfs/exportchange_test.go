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

// exportChange is a change to an export that an administrator makes. The server always answers.
type exportChange struct {
	name string
	// begin changes the export.
	begin func(t *testing.T, s *nfsd.Server, export string)
	// end undoes the change. It is nil for a change that cannot be undone.
	end func(t *testing.T, s *nfsd.Server, export string)
	// create is the code that CreateVolume and DeleteVolume must return after the change. The error of
	// CreateVolume must contain texts.
	create codes.Code
	texts  []string
	// reads means that published volumes can still be read, and healthy that their health reports no
	// problem.
	reads, healthy bool
}

// exportChanges contains the tested changes.
var exportChanges = []exportChange{
	{
		name:   "unexported",
		begin:  func(t *testing.T, s *nfsd.Server, export string) { s.Unexport(t, export) },
		end:    exportedAgain,
		create: codes.Unavailable, texts: []string{"no such directory", "export"},
	},
	{
		name: "replaced",
		begin: func(t *testing.T, s *nfsd.Server, export string) {
			must(t, os.RemoveAll(s.Dir(export)))
			exported(t, s, export)
		},
		create: codes.Unavailable, texts: []string{"uuid"},
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
		create: codes.Unavailable, texts: []string{"uuid"},
	},
	{
		name:   "readonly",
		begin:  func(t *testing.T, s *nfsd.Server, export string) { exported(t, s, export, "ro") },
		end:    exportedAgain,
		create: codes.FailedPrecondition, texts: []string{"read-only", "rw"}, reads: true, healthy: true,
	},
	{
		name:   "squashed",
		begin:  func(t *testing.T, s *nfsd.Server, export string) { exported(t, s, export, "root_squash") },
		end:    exportedAgain,
		create: codes.Unavailable, texts: []string{"no_root_squash"}, reads: true,
	},
}

// exported exports a directory, or changes the options of its export.
func exported(t *testing.T, s *nfsd.Server, export string, options ...string) {
	s.Export(t, strings.TrimPrefix(export, "/"), options...)
}

// exportedAgain exports a directory with the default options.
func exportedAgain(t *testing.T, s *nfsd.Server, export string) { exported(t, s, export) }

// TestExportChanges changes exports while the driver uses them. Each change affects one pool.
func TestExportChanges(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	pools := nfsPool("untouched", s, s.Export(t, "untouched"))
	for _, c := range exportChanges {
		pools += nfsPool(c.name, s, s.Export(t, c.name))
	}
	m := start(t, s.Node(t, "node-1"), "node-1", pools)
	eventually(t, func() error { return m.tryDirectory(t, "untouched", "first") })
	beside := m.image(t, "untouched", "beside", "ext4", 64*mib)
	m.up(t, beside)
	w := startWriter(t, m.file(beside, "records"))
	for _, c := range exportChanges {
		t.Run(c.name, func(t *testing.T) { c.run(t, m, s) })
		w.awaitProgress(t)
	}
	w.finish(t)
	m.remove(t, beside)
	must(t, m.delete(t, m.directory(t, "untouched", "first")))
}

// run changes the export of the pool with the change's name, checks the driver's calls, and undoes the
// change.
func (c exportChange) run(t *testing.T, m *machine, s *nfsd.Server) {
	eventually(t, func() error { return m.tryDirectory(t, c.name, c.name+"-spare") }) // until the pool is open
	directory, image := m.directory(t, c.name, c.name+"-directory"), m.image(t, c.name, c.name+"-image", "ext4", 64*mib)
	spare := m.directory(t, c.name, c.name+"-spare")
	m.up(t, directory)
	m.up(t, image)
	write(t, m.file(directory, "file"), "kept")
	write(t, m.file(image, "file"), "kept")

	export := "/" + c.name
	c.begin(t, s, export)
	wantCode(t, soon(t, func() error { return m.tryDirectory(t, c.name, "during-change") }, c.create, c.texts...), c.create, c.texts...)
	err := m.delete(t, spare)
	t.Logf("DeleteVolume: %v", err)
	if code := status.Code(err); code != c.create {
		t.Errorf("DeleteVolume: got error %v, want code %v", err, c.create)
	}
	t.Logf("NodeStageVolume: %v", m.stage(t, spare))
	got, err := os.ReadFile(m.file(directory, "file"))
	t.Logf("read: %q, %v", got, err)
	if c.reads != (err == nil) {
		t.Errorf("reading a published directory: got error %v, want success: %t", err, c.reads)
	}
	for _, v := range []*vol{directory, image} {
		reasons := m.health(t, v)
		t.Logf("health of %s: %q", v.name, reasons)
		// On a read-only export, an image may report a problem, because its filesystem cannot write.
		if healthy := len(reasons) == 0; healthy != c.healthy && (v == directory || healthy) {
			t.Errorf("got health reasons %q of %s, want none: %t", reasons, v.name, c.healthy)
		}
	}
	if c.end == nil {
		c.leave(t, m, directory, image)
		return
	}
	c.end(t, s, export)
	eventually(t, func() error { return m.tryDirectory(t, c.name, "after-change") })
	wantText(t, m.file(directory, "file"), "kept")
	write(t, m.file(image, "file"), "kept")
	m.down(t, directory)
	m.down(t, image)
	must(t, m.unstage(t, spare))
	for _, v := range []*vol{directory, image, spare, m.directory(t, c.name, "after-change")} {
		eventually(t, func() error { return m.delete(t, v) })
	}
}

// leave unpublishes and unstages volumes whose export no longer exists.
func (c exportChange) leave(t *testing.T, m *machine, volumes ...*vol) {
	t.Helper()
	for _, v := range volumes {
		must(t, m.unpublish(t, v))
		if err := m.unstage(t, v); err != nil {
			t.Errorf("NodeUnstageVolume of %s after its export was replaced: %v", v.name, err)
		}
	}
}

// soon repeats do, which calls CreateVolume, until its error has the wanted code and texts, because the NFS
// client caches attributes for some seconds. It returns the last error.
func soon(t *testing.T, do func() error, code codes.Code, texts ...string) (err error) {
	t.Helper()
	for end := time.Now().Add(waitTimeout / 4); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		err = do()
		ok := status.Code(err) == code
		for _, text := range texts {
			ok = ok && err != nil && strings.Contains(err.Error(), text)
		}
		if ok {
			break
		}
	}
	t.Logf("CreateVolume: %v", err)
	return err
}
