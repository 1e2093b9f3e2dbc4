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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/freeze"
)

// driverWord makes this program a driver that freezes what it is told of and then waits to be
// killed.
const driverWord = "driver"

func TestMain(m *testing.M) {
	if isChild, err := reexec.Run(os.Args, map[string]reexec.Role{freeze.Role: freeze.Guard}); isChild {
		if err != nil {
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == driverWord {
		fmt.Println(drive(os.Args[2], os.Args[3:]))
		select {}
	}
	// The race detector makes each process last a second longer, also the guardians.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}

// long is a limit that no test reaches, and soon one that it does.
const (
	long = 10 * time.Minute
	soon = 300 * time.Millisecond
)

// drive freezes the filesystems at the paths, which are their names.
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

// newFilesystem mounts a filesystem; what a failed test has left frozen is thawed.
func newFilesystem(t *testing.T, fsType string) string {
	t.Helper()
	size := map[string]string{"ext4": "64M", "xfs": "300M", "btrfs": "128M"}[fsType]
	dir := testenv.Filesystem(t, fsType, size)
	t.Cleanup(func() { _ = exec.Command("fsfreeze", "--unfreeze", dir).Run() })
	return dir
}

func target(t *testing.T, dir string) freeze.Target {
	t.Helper()
	root, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return freeze.Target{Root: root, Name: dir}
}

// isFrozen asks the kernel, which has no other way to tell: a second freeze is EBUSY.
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

// requireWritable writes to a filesystem, which waits for as long as it is frozen.
func requireWritable(t *testing.T, dir string) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() { wrote <- os.WriteFile(filepath.Join(dir, "written"), []byte("x"), 0o600) }()
	select {
	case err := <-wrote:
		must(t, err)
	case <-time.After(20 * time.Second):
		t.Fatalf("%s stayed frozen", dir)
	}
}

// guardians are the processes that guard what is frozen under a directory for notes.
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

func kill(t *testing.T, pid int) {
	t.Helper()
	must(t, syscall.Kill(pid, syscall.SIGKILL))
}

// eventually waits for what another process is about to do.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so: %s", what)
		}
	}
}

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

// requireOver tells whether nothing is left of a freeze.
func requireOver(t *testing.T, notes string, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		requireWritable(t, dir)
		if isFrozen(t, dir) {
			t.Errorf("%s is frozen", dir)
		}
	}
	if left := notesIn(t, notes); len(left) > 0 {
		t.Errorf("notes %v are left", left)
	}
	if pids := guardians(t, notes); len(pids) > 0 {
		t.Errorf("guardians %v are left", pids)
	}
}

func TestFreeze(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			one, two := newFilesystem(t, fsType), newFilesystem(t, fsType)
			notes := filepath.Join(t.TempDir(), "notes")
			z, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), long, target(t, one), target(t, two))
			must(t, err)
			for _, dir := range []string{one, two} {
				if !isFrozen(t, dir) {
					t.Errorf("%s is not frozen", dir)
				}
				if err := unix.Unmount(dir, 0); !errors.Is(err, unix.EBUSY) {
					t.Errorf("unmounting what is frozen: %v", err)
				}
			}
			if n := len(notesIn(t, notes)); n != 1 {
				t.Errorf("%d notes", n)
			}
			must(t, z.Thaw())
			must(t, z.Thaw())
			requireOver(t, notes, one, two)
		})
	}
}

// TestFreezeLoop: again and again, while somebody writes.
func TestFreezeLoop(t *testing.T) {
	const rounds = 70
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			dir, notes := newFilesystem(t, fsType), t.TempDir()
			ctx, stop := context.WithCancel(t.Context())
			written := make(chan error, 1)
			go func() { written <- write(ctx, filepath.Join(dir, "file")) }()
			f, root := freeze.New(reexec.Self, notes), target(t, dir)
			for range rounds {
				z, err := f.Freeze(t.Context(), long, root)
				must(t, err)
				must(t, z.Thaw())
			}
			stop()
			must(t, <-written)
			requireOver(t, notes, dir)
		})
	}
}

func write(ctx context.Context, path string) error {
	for ctx.Err() == nil {
		if err := os.WriteFile(path, make([]byte, 64<<10), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func TestLimit(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	z, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), soon, target(t, dir))
	must(t, err)
	requireWritable(t, dir)
	for range 2 {
		if err := z.Thaw(); !errors.Is(err, freeze.ErrExpired) {
			t.Errorf("%v", err)
		}
	}
	requireOver(t, notes, dir)
}

// TestThawedByOthers: an administrator's thaw is told.
func TestThawedByOthers(t *testing.T) {
	dir, notes := newFilesystem(t, "xfs"), t.TempDir()
	z, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), long, target(t, dir))
	must(t, err)
	testenv.Run(t, "fsfreeze", "--unfreeze", dir)
	if err := z.Thaw(); !errors.Is(err, freeze.ErrExpired) {
		t.Errorf("%v", err)
	}
	requireOver(t, notes, dir)
}

// TestRefused: if one cannot be frozen none is, and the freeze of somebody else stays.
func TestRefused(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	taken := newFilesystem(t, "ext4")
	testenv.Run(t, "fsfreeze", "--freeze", taken)
	for _, tc := range []struct {
		name    string
		targets []freeze.Target
		want    error
	}{
		{"taken", []freeze.Target{target(t, taken)}, syscall.EBUSY},
		{"second taken", []freeze.Target{target(t, dir), target(t, taken)}, syscall.EBUSY},
		{"same twice", []freeze.Target{target(t, dir), target(t, dir)}, syscall.EBUSY},
		{"second without", []freeze.Target{target(t, dir), target(t, "/proc")}, syscall.EOPNOTSUPP},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), long, tc.targets...)
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.targets[len(tc.targets)-1].Name) {
				t.Errorf("%v", err)
			}
			requireOver(t, notes, dir)
			if !isFrozen(t, taken) {
				t.Error("it was thawed")
			}
		})
	}
	testenv.Run(t, "fsfreeze", "--unfreeze", taken)
}

// TestNoGuardian: nothing is frozen that nobody would thaw.
func TestNoGuardian(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	for _, program := range []string{"/nowhere/program", "true", "false"} {
		if _, err := freeze.New(program, notes).Freeze(t.Context(), long, target(t, dir)); err == nil {
			t.Errorf("%s guards", program)
		}
		requireOver(t, notes, dir)
	}
}

func TestGuardAlone(t *testing.T) {
	if freeze.Guard(reexec.Input{}) == nil {
		t.Error("it guards without a driver")
	}
}

// TestSignals: what a terminal or a container sends to all does not end a freeze.
func TestSignals(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	z, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), long, target(t, dir))
	must(t, err)
	for _, pid := range guardians(t, notes) {
		for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1} {
			must(t, syscall.Kill(pid, signal))
		}
		group, err := syscall.Getpgid(pid)
		must(t, err)
		if group == syscall.Getpgrp() {
			t.Error("it is in the driver's group")
		}
	}
	must(t, z.Thaw())
	requireOver(t, notes, dir)
}

func TestGuardianKilled(t *testing.T) {
	one, two, notes := newFilesystem(t, "ext4"), newFilesystem(t, "xfs"), t.TempDir()
	z, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), long, target(t, one), target(t, two))
	must(t, err)
	for _, pid := range guardians(t, notes) {
		kill(t, pid)
	}
	requireWritable(t, one)
	requireWritable(t, two)
	if err := z.Thaw(); !errors.Is(err, freeze.ErrExpired) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("%v", err)
	}
	requireOver(t, notes, one, two)
}

// startDriver starts a driver, and returns when it has frozen, or is dead.
func startDriver(t *testing.T, crashAt crashpoint.Point, notes string, dirs ...string) *exec.Cmd {
	t.Helper()
	driver := exec.Command("/proc/self/exe", append([]string{driverWord, notes}, dirs...)...)
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
		t.Fatal(line)
	}
	return driver
}

// TestDriverKilled: what it has frozen is thawed, and no note is left. With the tag
// crashpoints it kills itself.
func TestDriverKilled(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			one, two, notes := newFilesystem(t, fsType), newFilesystem(t, fsType), t.TempDir()
			driver := startDriver(t, crashpoint.FreezeFrozen, notes, one, two)
			_ = driver.Process.Kill()
			requireWritable(t, one)
			requireWritable(t, two)
			eventually(t, "the guardian has ended", func() bool { return len(guardians(t, notes)) == 0 })
			requireOver(t, notes, one, two)
		})
	}
}

// isStopped tells whether no thread of a process runs (proc_pid_stat(5)).
func isStopped(t *testing.T, pid int) bool {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	must(t, err)
	return !slices.ContainsFunc(threads, func(name string) bool {
		stat, err := os.ReadFile(name)
		return err != nil || !strings.Contains(string(stat), ") T ")
	})
}

// frozenByTheDead leaves filesystems frozen, as a container does that is killed.
func frozenByTheDead(t *testing.T, notes string, dirs ...string) {
	t.Helper()
	driver := startDriver(t, "", notes, dirs...)
	pids := guardians(t, notes)
	if len(pids) != 1 {
		t.Fatalf("guardians %v", pids)
	}
	must(t, syscall.Kill(pids[0], syscall.SIGSTOP)) // it must not see its driver die first
	eventually(t, "the guardian has stopped", func() bool { return isStopped(t, pids[0]) })
	must(t, driver.Process.Kill())
	_ = driver.Wait()
	kill(t, pids[0])
	eventually(t, "the guardian has ended", func() bool { return len(guardians(t, notes)) == 0 })
	for _, dir := range dirs {
		if !isFrozen(t, dir) {
			t.Fatalf("%s is not frozen: nothing is tested", dir)
		}
	}
}

// open finds a filesystem by the name that drive has given it.
func open(name string) (*os.File, error) { return os.Open(name) }

func TestRecover(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			one, two, notes := newFilesystem(t, fsType), newFilesystem(t, fsType), t.TempDir()
			frozenByTheDead(t, notes, one, two)
			f := freeze.New(reexec.Self, notes)
			failing := errors.New("the pool is away")
			err := f.Recover(t.Context(), func(name string) (*os.File, error) {
				if name == two {
					return nil, failing
				}
				return os.Open(name)
			})
			if !errors.Is(err, failing) || len(notesIn(t, notes)) != 1 {
				t.Errorf("%v, and notes %v", err, notesIn(t, notes))
			}
			requireWritable(t, one)
			must(t, f.Recover(t.Context(), open))
			requireOver(t, notes, one, two)
			must(t, f.Recover(t.Context(), open))
		})
	}
}

// TestRecoverUnmounted: an unmounted filesystem stays frozen, and so is it when it is
// mounted again.
func TestRecoverUnmounted(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	device := testenv.Run(t, "findmnt", "-n", "-o", "SOURCE", dir)
	frozenByTheDead(t, notes, dir)
	// A killed process closes its files shortly after its command line is empty.
	eventually(t, "the filesystem is not in use", func() bool { return unix.Unmount(dir, 0) == nil })
	must(t, unix.Mount(device, dir, "ext4", 0, ""))
	if !isFrozen(t, dir) {
		t.Error("it is not frozen")
	}
	must(t, freeze.New(reexec.Self, notes).Recover(t.Context(), open))
	requireOver(t, notes, dir)
}

func TestRecoverNotes(t *testing.T) {
	notes := filepath.Join(t.TempDir(), "notes")
	f := freeze.New(reexec.Self, notes)
	var asked []string
	find := func(name string) (*os.File, error) {
		asked = append(asked, name)
		return nil, nil
	}
	must(t, f.Recover(t.Context(), find))
	must(t, os.Mkdir(notes, 0o700))
	for name, content := range map[string]string{"freeze-1": `["gone"]`, "freeze-2": "", "freeze-3": `["cut`, "other": `["x"]`} {
		must(t, os.WriteFile(filepath.Join(notes, name), []byte(content), 0o600))
	}
	must(t, f.Recover(t.Context(), find))
	if left := notesIn(t, notes); !slices.Equal(left, []string{"other"}) || !slices.Equal(asked, []string{"gone"}) {
		t.Errorf("left %v, asked for %v", left, asked)
	}
}

// TestRecoverBesideGuardian: what a guardian still has is left to it.
func TestRecoverBesideGuardian(t *testing.T) {
	dir, notes := newFilesystem(t, "ext4"), t.TempDir()
	f := freeze.New(reexec.Self, notes)
	z, err := f.Freeze(t.Context(), long, target(t, dir))
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := f.Recover(ctx, open); err == nil || !isFrozen(t, dir) {
		t.Errorf("it was thawed: %v", err)
	}
	must(t, z.Thaw())
	requireOver(t, notes, dir)
}

// hanging is a filesystem that cannot be frozen until release is called: its image is
// on one that is frozen.
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
	frozen := true
	release = func() {
		if frozen {
			frozen = false
			testenv.Run(t, "fsfreeze", "--unfreeze", below)
		}
	}
	t.Cleanup(release)
	return dir, release
}

// TestHang: a freeze that hangs in the kernel ends by its limit or with the call, what
// was frozen before is thawed then, and itself when the kernel is done.
func TestHang(t *testing.T) {
	for name, end := range map[string]func(context.Context) (context.Context, context.CancelFunc, time.Duration, error){
		"limit": func(ctx context.Context) (context.Context, context.CancelFunc, time.Duration, error) {
			ctx, cancel := context.WithCancel(ctx)
			return ctx, cancel, soon, freeze.ErrExpired
		},
		"call": func(ctx context.Context) (context.Context, context.CancelFunc, time.Duration, error) {
			ctx, cancel := context.WithTimeout(ctx, soon)
			return ctx, cancel, long, context.DeadlineExceeded
		},
	} {
		t.Run(name, func(t *testing.T) {
			first, notes := newFilesystem(t, "ext4"), t.TempDir()
			hung, release := hanging(t)
			ctx, cancel, limit, want := end(t.Context())
			defer cancel()
			_, err := freeze.New(reexec.Self, notes).Freeze(ctx, limit, target(t, first), target(t, hung))
			if !errors.Is(err, want) {
				t.Errorf("%v", err)
			}
			requireWritable(t, first)
			if n := len(guardians(t, notes)); n != 1 {
				t.Errorf("%d guardians", n)
			}
			release()
			requireWritable(t, hung)
			eventually(t, "the guardian has ended", func() bool { return len(guardians(t, notes)) == 0 })
			requireOver(t, notes, first, hung)
		})
	}
}

// TestHangKilled: a guardian that is killed while the kernel freezes leaves that frozen,
// and the driver thaws it.
func TestHangKilled(t *testing.T) {
	first, notes := newFilesystem(t, "ext4"), t.TempDir()
	hung, release := hanging(t)
	_, err := freeze.New(reexec.Self, notes).Freeze(t.Context(), soon, target(t, first), target(t, hung))
	if !errors.Is(err, freeze.ErrExpired) {
		t.Errorf("%v", err)
	}
	for _, pid := range guardians(t, notes) {
		kill(t, pid)
	}
	release()
	requireWritable(t, hung)
	eventually(t, "the driver has removed the note", func() bool { return len(notesIn(t, notes)) == 0 })
	requireOver(t, notes, first, hung)
}
