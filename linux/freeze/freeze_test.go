package freeze_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/freeze"
)

// driverArgument makes this test binary run as a driver: it freezes the filesystems in the next arguments, and
// then waits until it is killed.
const driverArgument = "driver"

// TestMain runs a guardian or a driver if the arguments name one, and otherwise the tests.
func TestMain(m *testing.M) {
	if isChild, err := reexec.Run(os.Args, map[string]reexec.Role{freeze.Role: freeze.Guard}); isChild {
		if err != nil {
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == driverArgument {
		fmt.Println(drive(os.Args[2], os.Args[3:]))
		select {}
	}
	// The race detector delays the end of each process by a second, including the guardians.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}

// long is a time limit that no test reaches. soon is a time limit that some tests wait for.
const (
	long = 10 * time.Minute
	soon = 300 * time.Millisecond
)

// drive freezes the filesystems at the paths, and uses the paths as their names.
func drive(notes string, paths []string) error {
	var targets []freeze.Target
	for _, path := range paths {
		root, err := os.Open(path)
		if err != nil {
			return err
		}
		targets = append(targets, freeze.Target{Root: root, Name: path})
	}
	_, err := freeze.New(reexec.Self, notes).Freeze(context.Background(), long, targets...)
	return err
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newFilesystem creates and mounts a filesystem, which is thawed at the end of the test.
func newFilesystem(t *testing.T, fsType string) string {
	t.Helper()
	size := map[string]string{"ext4": "64M", "xfs": "300M", "btrfs": "128M"}[fsType]
	dir := testenv.Filesystem(t, fsType, size)
	t.Cleanup(func() { _ = exec.Command("fsfreeze", "--unfreeze", dir).Run() })
	return dir
}

// target returns the target for the filesystem that is mounted at a path.
func target(t *testing.T, dir string) freeze.Target {
	t.Helper()
	root, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return freeze.Target{Root: root, Name: dir}
}

// isFrozen reports whether a filesystem is frozen. If it is, a second freeze fails with EBUSY.
func isFrozen(t *testing.T, dir string) bool {
	t.Helper()
	out, err := testenv.Output(dir, "fsfreeze", "--freeze", dir)
	if err == nil {
		testenv.Run(t, "fsfreeze", "--unfreeze", dir)
		return false
	}
	if !strings.Contains(out, "busy") {
		t.Fatalf("fsfreeze: %s", out)
	}
	return true
}

// requireWritable writes to a filesystem. The write blocks while the filesystem is frozen.
func requireWritable(t *testing.T, dir string) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() { wrote <- os.WriteFile(filepath.Join(dir, "written"), []byte("x"), 0o600) }()
	select {
	case err := <-wrote:
		must(t, err)
	case <-time.After(20 * time.Second):
		t.Fatalf("%s is still frozen", dir)
	}
}

// guardians returns the process IDs of the guardians whose note is in a directory.
func guardians(t *testing.T, notes string) []int {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	var pids []int
	for _, name := range lines {
		line, err := os.ReadFile(name)
		words := strings.Split(string(line), "\x00")
		if err != nil || len(words) < 3 || words[1] != freeze.Role || filepath.Dir(words[2]) != notes {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(name, "/")[2])
		must(t, err)
		pids = append(pids, pid)
	}
	return pids
}

func killGuardians(t *testing.T, notes string) {
	t.Helper()
	for _, pid := range guardians(t, notes) {
		must(t, syscall.Kill(pid, syscall.SIGKILL))
	}
}

// awaitNoGuardian waits until all guardians whose note is in a directory have ended.
func awaitNoGuardian(t *testing.T, notes string) {
	t.Helper()
	eventually(t, "the guardian has ended", func() bool { return len(guardians(t, notes)) == 0 })
}

// eventually waits until a condition is true.
func eventually(t *testing.T, condition string, isTrue func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !isTrue(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting until %s", condition)
		}
	}
}

// notesIn returns the names in the directory of the notes, which may be missing.
func notesIn(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if !errors.Is(err, os.ErrNotExist) {
		must(t, err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// requireOver requires that the filesystems are thawed, and that no note and no guardian are left.
func requireOver(t *testing.T, notes string, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		requireWritable(t, dir)
		if isFrozen(t, dir) {
			t.Errorf("%s is frozen", dir)
		}
	}
	if left := notesIn(t, notes); len(left) > 0 {
		t.Errorf("got remaining notes %v, want none", left)
	}
	if pids := guardians(t, notes); len(pids) > 0 {
		t.Errorf("got running guardians %v, want none", pids)
	}
}

// eachType runs a test for each type of filesystem.
func eachType(t *testing.T, test func(t *testing.T, fsType string)) {
	t.Helper()
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) { test(t, fsType) })
	}
}

// freezeDirs freezes filesystems.
func freezeDirs(t *testing.T, notes string, dirs ...string) *freeze.Frozen {
	t.Helper()
	var targets []freeze.Target
	for _, dir := range dirs {
		targets = append(targets, target(t, dir))
	}
	z, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), long, targets...)
	must(t, err)
	return z
}

// TestFreeze: filesystems are frozen, cannot be unmounted, and are thawed by Thaw, which can be called twice.
func TestFreeze(t *testing.T) {
	eachType(t, func(t *testing.T, fsType string) {
		one, two := newFilesystem(t, fsType), newFilesystem(t, fsType)
		notes := filepath.Join(t.TempDir(), "notes")
		z := freezeDirs(t, notes, one, two)
		for _, dir := range []string{one, two} {
			if !isFrozen(t, dir) {
				t.Errorf("%s is not frozen", dir)
			}
			if err := unix.Unmount(dir, 0); !errors.Is(err, unix.EBUSY) {
				t.Errorf("unmounting a frozen filesystem: got %v, want EBUSY", err)
			}
		}
		if n := len(notesIn(t, notes)); n != 1 {
			t.Errorf("got %d notes, want 1", n)
		}
		must(t, z.Thaw())
		must(t, z.Thaw())
		requireOver(t, notes, one, two)
	})
}

// TestFreezeWhileWriting: a filesystem is frozen and thawed repeatedly while a process writes to it.
func TestFreezeWhileWriting(t *testing.T) {
	eachType(t, func(t *testing.T, fsType string) {
		dir, notes := newFilesystem(t, fsType), t.TempDir()
		ctx, stop := context.WithCancel(t.Context())
		written := make(chan error, 1)
		go func() { written <- write(ctx, filepath.Join(dir, "file")) }()
		for range 70 {
			must(t, freezeDirs(t, notes, dir).Thaw())
		}
		stop()
		must(t, <-written)
		requireOver(t, notes, dir)
	})
}

// write writes a file repeatedly until the context ends.
func write(ctx context.Context, path string) error {
	for ctx.Err() == nil {
		if err := os.WriteFile(path, make([]byte, 64<<10), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// TestLimit: the guardian thaws the filesystem after the limit, and every later call of Thaw reports that.
func TestLimit(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	z, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), soon, target(t, dir))
	for limit := soon; errors.Is(err, freeze.ErrExpired); limit *= 2 { // a busy machine may need longer
		awaitNoGuardian(t, notes)
		z, err = freeze.New(reexec.Self, notes).Freeze(t.Context(), limit, target(t, dir))
	}
	must(t, err)
	requireWritable(t, dir)
	for range 2 {
		if err := z.Thaw(); !errors.Is(err, freeze.ErrExpired) {
			t.Errorf("Thaw after the limit: got %v, want %v", err, freeze.ErrExpired)
		}
	}
	requireOver(t, notes, dir)
}

// TestThawedByOthers: Thaw reports that another process has thawed the filesystem.
func TestThawedByOthers(t *testing.T) {
	dir, notes := newFilesystem(t, "xfs"), t.TempDir()
	z := freezeDirs(t, notes, dir)
	testenv.Run(t, "fsfreeze", "--unfreeze", dir)
	if err := z.Thaw(); !errors.Is(err, freeze.ErrExpired) {
		t.Errorf("got %v, want %v", err, freeze.ErrExpired)
	}
	requireOver(t, notes, dir)
}

// TestRefused: if one filesystem cannot be frozen, all are thawed. The freeze of another process stays.
func TestRefused(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	frozenByOther := newFilesystem(t, "ext4")
	testenv.Run(t, "fsfreeze", "--freeze", frozenByOther)
	for _, tc := range []struct {
		name    string
		targets []freeze.Target
		want    error
	}{
		{"frozen by another process", []freeze.Target{target(t, frozenByOther)}, syscall.EBUSY},
		{"second target frozen by another process", []freeze.Target{target(t, dir), target(t, frozenByOther)}, syscall.EBUSY},
		{"same filesystem twice", []freeze.Target{target(t, dir), target(t, dir)}, syscall.EBUSY},
		{"second target cannot be frozen", []freeze.Target{target(t, dir), target(t, "/proc")}, syscall.EOPNOTSUPP},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), long, tc.targets...)
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.targets[len(tc.targets)-1].Name) {
				t.Errorf("got %v, want %v and the name of the last target", err, tc.want)
			}
			requireOver(t, notes, dir)
			if !isFrozen(t, frozenByOther) {
				t.Error("the freeze of another process was thawed")
			}
		})
	}
	testenv.Run(t, "fsfreeze", "--unfreeze", frozenByOther)
}

// TestNoGuardian: without a guardian no filesystem is frozen.
func TestNoGuardian(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	for _, program := range []string{"/nowhere/program", "true", "false"} {
		if _, err := freeze.New(program, notes).Freeze(t.Context(), long, target(t, dir)); err == nil {
			t.Errorf("program %s: Freeze returned no error, want one because the program is no guardian", program)
		}
		requireOver(t, notes, dir)
	}
}

// TestGuardAlone: Guard fails in a process that no driver started.
func TestGuardAlone(t *testing.T) {
	if freeze.Guard(reexec.Input{}) == nil {
		t.Error("Guard without input from a driver: got no error, want one")
	}
}

// TestSignals: signals that a terminal or a container sends to all processes do not end a freeze.
func TestSignals(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	z := freezeDirs(t, notes, dir)
	for _, pid := range guardians(t, notes) {
		for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1} {
			must(t, syscall.Kill(pid, signal))
		}
		group, err := syscall.Getpgid(pid)
		must(t, err)
		if group == syscall.Getpgrp() {
			t.Error("the guardian is in the process group of the driver, want another group")
		}
	}
	must(t, z.Thaw())
	requireOver(t, notes, dir)
}

// TestGuardianKilled: after the guardian was killed, the driver thaws the filesystems, and Thaw reports that.
func TestGuardianKilled(t *testing.T) {
	one, two, notes := newFilesystem(t, "ext4"), newFilesystem(t, "xfs"), t.TempDir()
	z := freezeDirs(t, notes, one, two)
	killGuardians(t, notes)
	requireWritable(t, one)
	requireWritable(t, two)
	if err := z.Thaw(); !errors.Is(err, freeze.ErrExpired) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("got %v, want %v because the guardian was killed", err, freeze.ErrExpired)
	}
	requireOver(t, notes, one, two)
}

// startDriver starts a driver, and returns when it has frozen the filesystems or has died.
func startDriver(t *testing.T, crashAt crashpoint.Point, notes string, dirs ...string) *exec.Cmd {
	t.Helper()
	driver := exec.Command("/proc/self/exe", append([]string{driverArgument, notes}, dirs...)...)
	driver.Env = append(os.Environ(), "TRIVET_CRASH_AT="+string(crashAt))
	out, err := driver.StdoutPipe()
	must(t, err)
	must(t, driver.Start())
	t.Cleanup(func() {
		_ = driver.Process.Kill()
		_ = driver.Wait()
	})
	line, _ := bufio.NewReader(out).ReadString('\n')
	if line != "" && line != "<nil>\n" {
		t.Fatalf("the driver could not freeze the filesystems: %s", line)
	}
	return driver
}

// TestDriverKilled: after the driver was killed, its filesystems are thawed and its note is removed. With the
// build tag crashpoints the driver kills itself.
func TestDriverKilled(t *testing.T) {
	eachType(t, func(t *testing.T, fsType string) {
		one, two, notes := newFilesystem(t, fsType), newFilesystem(t, fsType), t.TempDir()
		driver := startDriver(t, crashpoint.FreezeFrozen, notes, one, two)
		_ = driver.Process.Kill()
		requireWritable(t, one)
		requireWritable(t, two)
		awaitNoGuardian(t, notes)
		requireOver(t, notes, one, two)
	})
}

// isStopped reports whether all threads of a process are stopped (proc_pid_stat(5)).
func isStopped(t *testing.T, pid int) bool {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	must(t, err)
	return !slices.ContainsFunc(threads, func(name string) bool {
		stat, err := os.ReadFile(name)
		return err != nil || !strings.Contains(string(stat), ") T ")
	})
}

// leaveFrozen kills a driver and its guardian, as when their container is killed. The filesystems stay frozen.
func leaveFrozen(t *testing.T, notes string, dirs ...string) {
	t.Helper()
	driver := startDriver(t, "", notes, dirs...)
	pids := guardians(t, notes)
	if len(pids) != 1 {
		t.Fatalf("got guardians %v, want one", pids)
	}
	must(t, syscall.Kill(pids[0], syscall.SIGSTOP)) // otherwise the guardian would thaw when the driver dies
	eventually(t, "the guardian has stopped", func() bool { return isStopped(t, pids[0]) })
	must(t, driver.Process.Kill())
	_ = driver.Wait()
	killGuardians(t, notes)
	awaitNoGuardian(t, notes)
	for _, dir := range dirs {
		if !isFrozen(t, dir) {
			t.Fatalf("setup: %s is not frozen", dir)
		}
	}
}

// open is the argument find of Recover. drive uses paths as names.
func open(name string) (*os.File, error) { return os.Open(name) }

// TestRecover: Recover thaws the filesystems that it finds. The note remains until all are thawed.
func TestRecover(t *testing.T) {
	eachType(t, func(t *testing.T, fsType string) {
		one, two, notes := newFilesystem(t, fsType), newFilesystem(t, fsType), t.TempDir()
		leaveFrozen(t, notes, one, two)
		f := freeze.New(reexec.Self, notes)
		failing := errors.New("the pool is unavailable")
		err := f.Recover(t.Context(), func(name string) (*os.File, error) {
			if name == two {
				return nil, failing
			}
			return os.Open(name)
		})
		if !errors.Is(err, failing) || len(notesIn(t, notes)) != 1 {
			t.Errorf("got %v and notes %v, want %v and one note", err, notesIn(t, notes), failing)
		}
		requireWritable(t, one)
		must(t, f.Recover(t.Context(), open))
		requireOver(t, notes, one, two)
		must(t, f.Recover(t.Context(), open))
	})
}

// TestRecoverUnmounted: a filesystem stays frozen while it is unmounted and when it is mounted again.
func TestRecoverUnmounted(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	device := testenv.Run(t, "findmnt", "-n", "-o", "SOURCE", dir)
	leaveFrozen(t, notes, dir)
	// A killed process closes its files shortly after it has disappeared from guardians.
	eventually(t, "the filesystem is not in use", func() bool { return unix.Unmount(dir, 0) == nil })
	must(t, unix.Mount(device, dir, "ext4", 0, ""))
	if !isFrozen(t, dir) {
		t.Error("the filesystem is not frozen after the mount")
	}
	must(t, freeze.New(reexec.Self, notes).Recover(t.Context(), open))
	requireOver(t, notes, dir)
}

// TestRecoverNotes: Recover removes notes whose filesystems no longer exist and incomplete notes, and ignores other
// files. It succeeds if the directory of the notes does not exist.
func TestRecoverNotes(t *testing.T) {
	notes := filepath.Join(t.TempDir(), "notes")
	f := freeze.New(reexec.Self, notes)
	var found []string
	find := func(name string) (*os.File, error) {
		found = append(found, name)
		return nil, nil
	}
	must(t, f.Recover(t.Context(), find))
	must(t, os.Mkdir(notes, 0o700))
	for name, content := range map[string]string{"freeze-1": `{"version":1,"filesystems":["removed"]}`, "freeze-2": "", "freeze-3": `{"version":1,"filesystems":["cut`, "other": `["x"]`} {
		must(t, os.WriteFile(filepath.Join(notes, name), []byte(content), 0o600))
	}
	must(t, f.Recover(t.Context(), find))
	if left := notesIn(t, notes); !slices.Equal(left, []string{"other"}) || !slices.Equal(found, []string{"removed"}) {
		t.Errorf("got remaining notes %v and calls of find for %v, want [other] and [removed]", left, found)
	}
}

// TestRecoverOtherVersion: Recover keeps a note of another version, and returns an error with the remedy.
func TestRecoverOtherVersion(t *testing.T) {
	notes := t.TempDir()
	for name, content := range map[string]string{"freeze-1": `{"version":2,"filesystems":{"name":"x"}}`, "freeze-2": `["x"]`} {
		must(t, os.WriteFile(filepath.Join(notes, name), []byte(content), 0o600))
	}
	err := freeze.New(reexec.Self, notes).Recover(t.Context(), func(name string) (*os.File, error) {
		t.Errorf("find was called for %s", name)
		return nil, nil
	})
	for _, want := range []string{"freeze-1", "version 2, this driver reads version 1: run a driver that reads version 2", "freeze-2", "version 0"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	if left := notesIn(t, notes); len(left) != 2 {
		t.Errorf("got remaining notes %v, want both", left)
	}
}

// TestRecoverBesideGuardian: Recover does not thaw the filesystems of a running guardian.
func TestRecoverBesideGuardian(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	z := freezeDirs(t, notes, dir)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := freeze.New(reexec.Self, notes).Recover(ctx, open); err == nil || !isFrozen(t, dir) {
		t.Errorf("Recover beside a running guardian: got %v, want an error and a frozen filesystem", err)
	}
	must(t, z.Thaw())
	requireOver(t, notes, dir)
}

// hanging creates a filesystem whose freeze hangs until release is called, because its image is on a frozen
// filesystem.
func hanging(t *testing.T) (dir string, release func()) {
	t.Helper()
	below := testenv.Filesystem(t, "ext4", "256M")
	image, dir := filepath.Join(below, "image"), t.TempDir()
	testenv.Run(t, "truncate", "-s", "64M", image)
	testenv.Run(t, "mkfs.ext4", "-q", image)
	testenv.Run(t, "mount", "-o", "loop", image, dir)
	t.Cleanup(func() { testenv.Run(t, "umount", dir) })
	must(t, os.WriteFile(filepath.Join(dir, "dirty"), make([]byte, 1<<20), 0o600))
	testenv.Run(t, "fsfreeze", "--freeze", below)
	release = sync.OnceFunc(func() { testenv.Run(t, "fsfreeze", "--unfreeze", below) })
	t.Cleanup(release)
	return dir, release
}

// hangs reports whether a guardian hangs in the freeze of the filesystem at dir (proc_pid_syscall(5)). notes is the
// directory of its note.
func hangs(t *testing.T, notes, dir string) bool {
	t.Helper()
	const fifreeze = "0xc0045877"
	for _, pid := range guardians(t, notes) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
		must(t, err)
		for _, name := range threads {
			call, _ := os.ReadFile(name) // fails if the thread has ended
			words := strings.Fields(string(call))
			if len(words) < 3 || words[0] != strconv.Itoa(unix.SYS_IOCTL) || words[2] != fifreeze {
				continue
			}
			fd, err := strconv.ParseUint(words[1], 0, 32)
			must(t, err)
			if root, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd)); root == dir {
				return true
			}
		}
	}
	return false
}

// expireHanging calls Freeze, and returns its error when the limit has passed and the freeze of the filesystem at hung
// hangs. On a busy machine, the limit may pass before that freeze begins. Then it tries again with a longer limit.
func expireHanging(t *testing.T, notes, first, hung string) error {
	t.Helper()
	for limit := soon; ; limit *= 2 {
		_, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), limit, target(t, first), target(t, hung))
		eventually(t, "the freeze hangs or the guardian has ended", func() bool {
			return hangs(t, notes, hung) || len(guardians(t, notes)) == 0
		})
		if hangs(t, notes, hung) || !errors.Is(err, freeze.ErrExpired) {
			return err
		}
	}
}

// cancelHanging calls Freeze, ends its context when the freeze of the filesystem at hung hangs, and returns the error.
func cancelHanging(t *testing.T, notes, first, hung string) error {
	t.Helper()
	targets := []freeze.Target{target(t, first), target(t, hung)}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := make(chan error, 1)
	go func() {
		_, err := freeze.New(reexec.Self, notes).Freeze(ctx, long, targets...)
		result <- err
	}()
	eventually(t, "the freeze hangs", func() bool { return hangs(t, notes, hung) })
	cancel()
	return <-result
}

// TestHang: Freeze returns at its limit or when ctx ends, even if a freeze hangs in the kernel. The
// filesystems that were frozen before are thawed at once, and the hanging one when the kernel has frozen it.
func TestHang(t *testing.T) {
	for name, tc := range map[string]struct {
		freeze func(t *testing.T, notes, first, hung string) error
		want   error
	}{
		"limit":   {expireHanging, freeze.ErrExpired},
		"context": {cancelHanging, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			first, notes := newFilesystem(t, "ext4"), t.TempDir()
			hung, release := hanging(t)
			if err := tc.freeze(t, notes, first, hung); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			requireWritable(t, first)
			if n := len(guardians(t, notes)); n != 1 {
				t.Errorf("got %d guardians, want 1 because the freeze still hangs", n)
			}
			release()
			requireWritable(t, hung)
			awaitNoGuardian(t, notes)
			requireOver(t, notes, first, hung)
		})
	}
}

// TestHangKilled: if the guardian is killed while the kernel freezes a filesystem, the driver thaws the filesystem.
func TestHangKilled(t *testing.T) {
	first, notes := newFilesystem(t, "ext4"), t.TempDir()
	hung, release := hanging(t)
	if err := expireHanging(t, notes, first, hung); !errors.Is(err, freeze.ErrExpired) {
		t.Errorf("got %v, want %v", err, freeze.ErrExpired)
	}
	killGuardians(t, notes)
	release()
	requireWritable(t, hung)
	eventually(t, "the driver has removed the note", func() bool { return len(notesIn(t, notes)) == 0 })
	requireOver(t, notes, first, hung)
}
