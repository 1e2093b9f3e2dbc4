package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/pool/shared"
	"github.com/trivet-csi/trivet/volume"
)

// openExportDir opens a shared pool in a directory, which simulates an export. Each call simulates a
// process that maintains the pool.
func openExportDir(t *testing.T, dir string) *Pool {
	t.Helper()
	root, err := os.Open(dir)
	must(t, err)
	c := Config{Name: "nas", NFS: &NFS{Server: "nas.lan", Export: "/tank", Init: true}}
	p, err := openBase(Forms, c, root)
	must(t, err)
	t.Cleanup(p.Close)
	p.Trash.maintained = true
	must(t, p.openExport(t.Context(), nil, true))
	return p
}

// sharedVolume is the record of a directory volume in a shared pool.
func sharedVolume(p *Pool, name string) volume.Volume {
	return volume.Volume{
		Version: volume.RecordVersion, ID: p.ID("nfs", name), CoName: name, Capacity: 1 << 20,
		Directory: &volume.Directory{OnDelete: volume.OnDeleteDelete, Mode: 0o777}, Created: time.Now().UTC().Truncate(time.Second),
	}
}

// counts tells whether the ledger of a pool has a reservation of a volume.
func counts(p *Pool, name string) bool {
	_, ok := p.ledger.Reservations()[FolderPath(name)]
	return ok
}

// nothing is a prepare function of CreateDirectory that does nothing.
func nothing(*os.File, bool) error { return nil }

// wantTmp fails the test unless the folder tmp of a pool contains n entries.
func wantTmp(t *testing.T, dir string, n int) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(dir, tmpDir))
	must(t, err)
	if len(left) != n {
		t.Errorf("tmp contains %v, want %d entries", left, n)
	}
}

// TestLostReplies: a step that is repeated because its reply was lost succeeds.
func TestLostReplies(t *testing.T) {
	p := openExportDir(t, t.TempDir())
	v := sharedVolume(p, "v")
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	have, err := p.Lookup("v")
	must(t, err)
	commit := func(token string) error {
		return p.building.commit("v.gone.1", p.volumes, "v", token, func() (string, error) { return have.CreationID, nil })
	}
	if err := commit(have.CreationID); err != nil {
		t.Errorf("repeated commit: %v", err)
	}
	if err := commit("another's"); !errors.Is(err, ErrExists) {
		t.Errorf("commit over another process's volume: got %v, want ErrExists", err)
	}
	a := Attachment{Version: attachmentVersion, Node: "n"}
	must(t, p.Attachments.linkAttachment("v", a))
	if err := p.Attachments.linkAttachment("v", a); err != nil {
		t.Errorf("repeated link: %v", err)
	}
	must(t, p.Attachments.removeAttachment("v", "node"))
	if err := p.Attachments.removeAttachment("v", "node"); err != nil {
		t.Errorf("repeated removal of an attachment: %v", err)
	}
	must(t, p.takeOut("v", p.trash, "v.1"))
	if err := p.takeOut("v", p.trash, "v.1"); err != nil {
		t.Errorf("repeated move to the trash: %v", err)
	}
}

// TestSweep: a sweep removes the entries of a process that has ended, but not those of a process that
// lives.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	ended, living, sweeper := openExportDir(t, dir), openExportDir(t, dir), openExportDir(t, dir)
	entries := map[*Pool]string{}
	for _, p := range []*Pool{ended, living} {
		entry, err := p.medium.Entry("v", 1<<20, "")
		must(t, err)
		entries[p] = entry
		must(t, p.building.makeTmp(t.Context(), entry))
		must(t, p.medium.AnnounceGrowth("w", 4096))
	}
	must(t, sweeper.accounts.Refresh(t.Context(), func(string) bool { return false }))
	if u, err := sweeper.Usage(); err != nil || u.Promised != 2*(1<<20+4096) {
		t.Errorf("before the sweep: got %d promised bytes, %v; want those of the entries of both processes, %d", u.Promised, err, 2*(1<<20+4096))
	}
	kill(t, dir, ended)
	must(t, sweeper.Export().Sweep(t.Context()))
	wantTmp(t, dir, 2)
	if err := living.buildAndCommit(t.Context(), sharedVolume(living, "v"), entries[living], func(root *os.Root) error { return root.Mkdir(DataDir, 0o700) }, func(string) error { return nil }); err != nil {
		t.Errorf("commit of a process that lives: %v", err)
	}
	// A process that lives although it counts as ended cannot commit an incomplete volume.
	err := ended.buildAndCommit(t.Context(), sharedVolume(ended, "w"), entries[ended], func(*os.Root) error { return nil }, func(string) error { return nil })
	if err == nil {
		t.Error("an incomplete volume was committed")
	}
	wantOwners(t, dir, 2)
	living.medium.Close()
	sweeper.medium.Close()
	wantOwners(t, dir, 0)
}

// wantOwners fails unless a pool has n owner files.
func wantOwners(t *testing.T, dir string, n int) {
	t.Helper()
	if owners, err := filepath.Glob(filepath.Join(dir, shared.OwnersDir, "*")); err != nil || len(owners) != n {
		t.Errorf("got the owners %v, %v; want %d", owners, err, n)
	}
}

// TestRefreshOnlyIfNeeded: a process reads the folders again only after a transaction of another
// process, and then only the records of new and grown volumes.
func TestRefreshOnlyIfNeeded(t *testing.T) {
	dir := t.TempDir()
	a, b := openExportDir(t, dir), openExportDir(t, dir)
	create := func(p *Pool, name string) {
		t.Helper()
		must(t, p.CreateDirectory(t.Context(), sharedVolume(p, name), nil, nothing))
	}
	create(b, "u")
	create(a, "v")
	create(a, "v2")                                                 // the first transaction after b's has refreshed the ledger
	a.ledger.Set(FolderPath("ghost"), ledger.Reservation{Bytes: 1}) // has no folder, so a refresh would remove it
	create(a, "w")
	v, err := a.Lookup("v")
	must(t, err)
	must(t, a.Grow(t.Context(), v, 2<<20, func() error { return nil }))
	create(a, "x")
	if !counts(a, "ghost") {
		t.Error("the folders were read although no other process had a transaction")
	}
	must(t, b.accounts.Refresh(t.Context(), func(string) bool { return false }))
	for _, name := range []string{"v", "w"} { // wrong, until the record is read again
		b.ledger.Set(FolderPath(name), ledger.Reservation{Bytes: 5})
	}
	create(b, "y")
	if got := b.ledger.Reservations()[FolderPath("v")].Bytes; got != 2<<20 {
		t.Errorf("volume that has grown: got a reservation of %d bytes, want %d", got, 2<<20)
	}
	if got := b.ledger.Reservations()[FolderPath("w")].Bytes; got != 5 {
		t.Errorf("volume that has not grown: got a reservation of %d bytes, want 5, because its record is not read again", got)
	}
	create(a, "z")
	if counts(a, "ghost") || !counts(a, "y") {
		t.Error("the folders were not read although another process had a transaction")
	}
}

// FuzzAttachment: any file content is parsed as a valid attachment, or refused.
func FuzzAttachment(f *testing.F) {
	f.Add([]byte(`{"version":1,"node":"n"}`))
	f.Add([]byte(`{"version":2,"node":"n"}`))
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := parseAttachment(b); err == nil && (a.Node == "" || a.MultiNode) {
			t.Errorf("%q: got %+v, want a node, and no MultiNode", b, a)
		}
	})
}

// TestLostOwnerLock: a process whose owner file was removed by another process makes a new owner file
// at its next sweep.
func TestLostOwnerLock(t *testing.T) {
	dir := t.TempDir()
	p, other := openExportDir(t, dir), openExportDir(t, dir)
	old := token(t, p)
	must(t, os.Remove(filepath.Join(dir, shared.OwnersDir, old)))
	must(t, p.Export().Sweep(t.Context()))
	entry, err := p.medium.Entry("v", 4096, "")
	must(t, err)
	must(t, p.building.makeTmp(t.Context(), entry))
	must(t, other.Export().Sweep(t.Context()))
	if token(t, p) == old {
		t.Error("the process still has the token of the removed owner file")
	}
	if _, err := os.Stat(filepath.Join(dir, tmpDir, entry)); err != nil {
		t.Errorf("the entry that the process made after its sweep: %v", err)
	}
}

// token is the name of a process's owner file.
func token(t *testing.T, p *Pool) string {
	t.Helper()
	entry, err := p.medium.Entry("x", 0, "")
	must(t, err)
	return strings.Split(entry, ".")[1]
}

// kill releases the lock of a process's owner file, as the kernel does when the process ends.
func kill(t *testing.T, dir string, p *Pool) {
	t.Helper()
	fd := descriptor(t, filepath.Join(dir, shared.OwnersDir, token(t, p)))
	must(t, unix.Flock(fd, unix.LOCK_UN))
}

// descriptor is the first descriptor of this process that is open on a file.
func descriptor(t *testing.T, path string) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, e := range all {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && to == path {
			fd, err := strconv.Atoi(e.Name())
			must(t, err)
			return fd
		}
	}
	t.Fatalf("%s is not open", path)
	return -1
}

// breakFile makes all uses of an open file fail until repair is called.
func breakFile(t *testing.T, path string) (repair func()) {
	t.Helper()
	fd := descriptor(t, path)
	null, err := os.OpenFile(os.DevNull, unix.O_PATH, 0)
	must(t, err)
	defer null.Close()
	old, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	must(t, err)
	must(t, unix.Dup3(int(null.Fd()), fd, unix.O_CLOEXEC))
	return func() {
		must(t, unix.Dup3(old, fd, unix.O_CLOEXEC))
		must(t, unix.Close(old))
	}
}

// TestGrowthNotAnnounced: if recording a growth in the ledger file fails, other processes count the new
// bytes nevertheless, also after the announcement.
func TestGrowthNotAnnounced(t *testing.T) {
	for name, grow := range map[string]func(p *Pool, v volume.Volume, fail func() error) error{
		"Grow": func(p *Pool, v volume.Volume, fail func() error) error { return p.Grow(t.Context(), v, 4<<20, fail) },
		"RaiseCapacity": func(p *Pool, v volume.Volume, fail func() error) error {
			if err := fail(); err != nil {
				return err
			}
			return p.RaiseCapacity(t.Context(), v, 4<<20)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			a, b := openExportDir(t, dir), openExportDir(t, dir)
			v := sharedVolume(a, "v")
			must(t, a.CreateDirectory(t.Context(), v, nil, nothing))
			wantPromised := func(when string, want int64) {
				t.Helper()
				must(t, b.medium.Exclusively(t.Context(), func(func(func() error) error) error { return nil }))
				u, err := b.Usage()
				must(t, err)
				if u.Promised != want {
					t.Errorf("%s: got %d promised bytes, want %d", when, u.Promised, want)
				}
			}
			wantPromised("before the growth", 1<<20)
			repair := func() {}
			if err := grow(a, v, func() error { repair = breakFile(t, filepath.Join(dir, ".trivet/ledger")); return nil }); !errors.Is(err, volume.ErrUnavailable) {
				t.Fatalf("without the ledger file: got %v, want ErrUnavailable", err)
			}
			if got, err := a.Lookup("v"); err != nil || got.Capacity != 4<<20 {
				t.Fatalf("got recorded capacity %d, %v; want %d", got.Capacity, err, 4<<20)
			}
			repair()
			must(t, a.CreateDirectory(t.Context(), sharedVolume(a, "of-a"), nil, nothing))
			wantPromised("before the announcement", 5<<20)
			must(t, a.medium.CompleteGrowth(t.Context(), "v"))
			wantPromised("after the announcement", 5<<20)
			wantTmp(t, dir, 0)
		})
	}
}

// TestRemovedMeanwhile: publishing fails if the volume is deleted or unpublished meanwhile.
func TestRemovedMeanwhile(t *testing.T) {
	p := openExportDir(t, t.TempDir())
	v := sharedVolume(p, "v")
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	for _, a := range []Attachment{{Node: "n"}, {Node: "n", MultiNode: true}} {
		if err := p.Attachments.checkOthers("v", a); !errors.Is(err, volume.ErrPending) {
			t.Errorf("%+v, unpublished meanwhile: got %v, want ErrPending", a, err)
		}
		if err := p.Attachments.checkFailedLink("v", a, syscall.EEXIST); !errors.Is(err, volume.ErrPending) {
			t.Errorf("%+v, another process's attachment was removed before it was read: got %v, want ErrPending", a, err)
		}
		must(t, p.Attachments.Attach("v", a))
		if err := p.Remove(t.Context(), v); !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("%+v, delete while published: got %v, want ErrPrecondition", a, err)
		}
		must(t, p.Attachments.Detach("v", "n"))
	}
	must(t, p.Remove(t.Context(), v))
	if err := p.Attachments.checkOthers("v", Attachment{Node: "n", MultiNode: true}); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("deleted meanwhile: got %v, want ErrNotFound", err)
	}
	if err := p.Attachments.checkFailedLink("v", Attachment{Node: "n"}, syscall.EIO); !errors.Is(err, syscall.EIO) {
		t.Errorf("failed link: got %v, want EIO", err)
	}
}

// TestInconclusive: an error of the server does not mean that a volume is damaged or does not exist.
func TestInconclusive(t *testing.T) {
	p := openExportDir(t, t.TempDir())
	for _, errno := range []error{syscall.EPERM, syscall.EACCES, syscall.EKEYEXPIRED, syscall.EIO, syscall.ESTALE} {
		if !p.inconclusive(&os.PathError{Op: "openat2", Path: "volume.json", Err: errno}) {
			t.Errorf("%v is not inconclusive", errno)
		}
	}
	if _, err := p.Lookup("none"); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("missing volume: got %v, want ErrNotFound", err)
	}
	if _, err := p.Lookup("none" + strings.Repeat("/x", 5000)); errors.Is(err, volume.ErrNotFound) {
		t.Errorf("folder that cannot be read: got %v, want another error", err)
	}
}

// TestRemoveUnwritable: folders without any permissions are removed, even if the server gives this
// node's root no privileges.
func TestRemoveUnwritable(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o711)) //nolint:gosec // the other user needs access
	p := openExportDir(t, dir)
	tree := filepath.Join(dir, tmpDir, "tree")
	must(t, os.MkdirAll(filepath.Join(tree, "a/b/c"), 0o700))
	const user = 64321
	for _, path := range []string{"a/b/c", "a/b", "a", "."} {
		must(t, os.Chown(filepath.Join(tree, path), user, user))
		must(t, os.Chmod(filepath.Join(tree, path), 0))
	}
	must(t, os.Chown(filepath.Join(dir, tmpDir), user, user))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with this goroutine
		err := syscall.Setfsuid(user)
		if _, denied := os.ReadDir(tree); !errors.Is(denied, os.ErrPermission) {
			err = errors.Join(err, fmt.Errorf("the user can read the tree, so this test proves nothing: %w", denied))
		}
		done <- errors.Join(err, p.Trash.removeTree(t.Context(), p.tmp, "tree"))
	}()
	must(t, <-done)
	if _, err := os.Lstat(tree); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the tree after its removal: got %v, want ErrNotExist", err)
	}
}

// TestInheritedProject: a volume's directory cannot be moved below a directory that passes its quota
// project on to its content. A directory that already exists there is adopted.
func TestInheritedProject(t *testing.T) {
	testenv.RequireRoot(t)
	dir := testenv.Filesystem(t, "xfs", "300M")
	p := openExportDir(t, dir)
	team := filepath.Join(dir, "team")
	must(t, os.Mkdir(team, 0o755))
	testenv.Run(t, "chattr", "-p", "7", "+P", team)
	v := placedVolume(p, "v")
	if err := p.CreateDirectory(t.Context(), v, nil, nothing); !errors.Is(err, volume.ErrPrecondition) || !errors.Is(err, syscall.EXDEV) {
		t.Fatalf("create below a directory with another project: got %v, want EXDEV", err)
	}
	must(t, os.Mkdir(filepath.Join(team, "v"), 0o755))
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	folder := filepath.Join(dir, volumesDir, "v")
	testenv.Run(t, "chattr", "-p", "8", "+P", folder)
	if err := p.Remove(t.Context(), v); !errors.Is(err, volume.ErrPrecondition) || !errors.Is(err, syscall.EXDEV) {
		t.Errorf("delete from a directory with another project: got %v, want EXDEV", err)
	}
	testenv.Run(t, "chattr", "-p", "0", "-P", folder)
	must(t, p.Remove(t.Context(), v))
	if left, err := filepath.Glob(team + "/*"); err != nil || len(left) > 0 {
		t.Errorf("after the delete: got %v, %v; want nothing", left, err)
	}
}

// TestRemovePlaced: a directory that a failed create has moved to its subDir is removed, unless it
// contains files or belongs to another volume.
func TestRemovePlaced(t *testing.T) {
	for name, test := range map[string]struct {
		meanwhile func(t *testing.T, other *Pool, placed string)
		stays     bool
	}{
		"empty": {meanwhile: func(*testing.T, *Pool, string) {}},
		"with a file": {stays: true, meanwhile: func(t *testing.T, _ *Pool, placed string) {
			t.Helper()
			must(t, os.WriteFile(filepath.Join(placed, "f"), nil, 0o600))
		}},
		"adopted by another volume": {stays: true, meanwhile: func(t *testing.T, other *Pool, _ string) {
			t.Helper()
			must(t, other.CreateDirectory(t.Context(), placedVolume(other, "other"), nil, nothing))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ended, sweeper := openExportDir(t, dir), openExportDir(t, dir)
			entry, err := ended.medium.Entry("v", 4096, "")
			must(t, err)
			must(t, ended.building.makeTmp(t.Context(), entry))
			must(t, os.Mkdir(filepath.Join(dir, tmpDir, entry, DataDir), 0o700))
			must(t, ended.placeData(entry, "team/v"))
			placed := filepath.Join(dir, "team/v")
			test.meanwhile(t, sweeper, placed)
			kill(t, dir, ended)
			must(t, sweeper.Export().Sweep(t.Context()))
			if _, err := os.Stat(placed); errors.Is(err, os.ErrNotExist) == test.stays {
				t.Errorf("after the sweep: got %v, want the directory to exist: %t", err, test.stays)
			}
			wantTmp(t, dir, 0)
		})
	}
}

// placedVolume is the record of a volume with subDir team/v.
func placedVolume(p *Pool, name string) volume.Volume {
	v := sharedVolume(p, name)
	v.Directory.SubDir = "team/v"
	return v
}
