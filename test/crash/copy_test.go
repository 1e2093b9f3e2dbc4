package crash

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/freeze"
)

// bulk is an amount of data in bytes. A test can interrupt its copy.
const bulk = 128 << 20

// newBulk creates a volume with bulk bytes of data on ext4, which cannot share blocks, so that copies
// take long. Then it makes the calls of path.
func newBulk(t *testing.T, k kind, path ...call) *co {
	t.Helper()
	h := newHost(t, "ext4", crashing, "")
	c, err := newCO(h, "pvc-1", k)
	must(t, err)
	c.size, c.data = 2*bulk, make([]byte, bulk)
	_, _ = rand.Read(c.data) // never fails
	must(t, c.do(create, controllerPublish, stage, publish, write))
	must(t, c.do(path...))
	return c
}

// unpublishAll are the calls after which a published volume is not in use.
var unpublishAll = []call{unpublish, unstage, controllerUnpublish}

// TestKilledInSnapshot kills the driver while it copies an image for a snapshot. The next driver
// removes the incomplete copy, and the snapshot can be taken again.
func TestKilledInSnapshot(t *testing.T) {
	t.Parallel()
	c := newBulk(t, raw[0], unpublishAll...)
	c.killWhile(t, snapshot, func() bool { c.host.kill(); return true })
	must(t, c.host.start(""))
	must(t, errors.Join(c.checkSnapshots(), c.awaitNoTemporaryFiles()))
	must(t, c.do(snapshot))
	c.finish(t)
}

// TestKilledInRestore kills the driver while it copies a snapshot to a new volume. The next driver
// removes the incomplete copy, and the volume can be created again.
func TestKilledInRestore(t *testing.T) {
	t.Parallel()
	origin := newBulk(t, raw[0], append(unpublishAll, snapshot)...)
	must(t, origin.do(remove))
	c, err := origin.restored(0, "pvc-2")
	must(t, err)
	c.origin = origin
	c.killWhile(t, create, func() bool { c.host.kill(); return true })
	must(t, c.host.start(""))
	must(t, errors.Join(emptyDir(filepath.Join(c.host.pool, "volumes")), c.awaitNoTemporaryFiles()))
	must(t, c.do(create))
	c.finish(t)
}

// TestThawedWithoutDriver kills the driver while a filesystem is frozen. The filesystem is thawed
// before the next driver starts.
func TestThawedWithoutDriver(t *testing.T) {
	t.Parallel()
	for _, r := range snapshotRows {
		if r.point != crashpoint.FreezeFrozen {
			continue
		}
		for _, k := range r.kinds {
			t.Run(r.name(k), func(t *testing.T) {
				t.Parallel()
				c := r.crash(t, r.host(t, k), k)
				for _, one := range c.sources() {
					one.awaitThawed(t)
				}
				must(t, c.host.start(""))
				must(t, c.do(snapshot))
				c.finish(t)
			})
		}
	}
}

// TestThawedByNextDriver kills the driver and the guardian process that would thaw the filesystem. The
// next driver thaws it.
func TestThawedByNextDriver(t *testing.T) {
	t.Parallel()
	c := newBulk(t, ext4[0])
	t.Cleanup(func() { _ = exec.Command("fsfreeze", "--unfreeze", c.staging()).Run() }) // if the test failed
	c.killWhile(t, snapshot, func() bool {
		must(t, c.host.killBoth())
		return c.isFrozen(t)
	})
	must(t, c.host.start(""))
	c.awaitThawed(t)
	must(t, c.awaitNoTemporaryFiles())
	must(t, c.do(snapshot))
	c.finish(t)
}

// killWhile makes a call that copies an image, and calls kill when the copy contains data. If the call
// ends before that, or kill returns false, it undoes the call and tries again.
func (c *co) killWhile(t *testing.T, what call, kill func() bool) {
	t.Helper()
	for range 10 {
		answered := make(chan error, 1)
		go func() { answered <- c.attempt(context.Background(), what) }()
		must(t, poll(func(context.Context) error { return c.copying(answered) }))
		killed := kill()
		if err := <-answered; killed && status.Code(err) == codes.Unavailable {
			return
		}
		must(t, c.host.start(""))
		must(t, c.do(undo[what]...))
	}
	t.Fatalf("%s: the driver was never killed during the copy", what)
}

// copying returns nil if an image is being copied, or if the call that copies has ended.
func (c *co) copying(answered <-chan error) error {
	if len(answered) > 0 {
		return nil
	}
	for _, pattern := range []string{".trivet/tmp/*/image", ".trivet/tmp/*/0/image"} { // of a volume, and of a snapshot
		images, err := filepath.Glob(filepath.Join(c.host.pool, pattern))
		if err != nil {
			return finalError{err}
		}
		for _, image := range images {
			var st syscall.Stat_t
			if err := syscall.Stat(image, &st); err == nil && st.Blocks > 0 {
				return nil
			}
		}
	}
	return errors.New("no image is being copied")
}

// awaitNoTemporaryFiles waits until the driver has removed the incomplete copies.
func (c *co) awaitNoTemporaryFiles() error {
	return poll(func(context.Context) error { return emptyDir(filepath.Join(c.host.pool, ".trivet/tmp")) })
}

// killBoth kills the driver and its guardian. It stops the driver first, so that neither can react to
// the end of the other.
func (h *host) killBoth() error {
	driver := h.process.cmd.Process
	if err := driver.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	if err := poll(func(context.Context) error { return stopped(driver.Pid) }); err != nil {
		return err
	}
	guardians, err := guardiansOf(driver.Pid)
	for _, pid := range guardians {
		err = errors.Join(err, syscall.Kill(pid, syscall.SIGKILL))
	}
	h.kill()
	return err
}

// stopped returns nil if all threads of a process are stopped (state T of proc_pid_stat(5)).
func stopped(pid int) error {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return finalError{err}
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		if _, rest, _ := strings.Cut(string(b), ") "); !strings.HasPrefix(rest, "T") {
			return fmt.Errorf("got state %q in %s, want T", rest, task)
		}
	}
	return nil
}

// guardiansOf returns the PIDs of the guardian processes of a driver.
func guardiansOf(driver int) (pids []int, err error) {
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range all {
		line, cerr := os.ReadFile(path)
		stat, serr := os.ReadFile(filepath.Join(filepath.Dir(path), "stat"))
		if cerr != nil || serr != nil || !strings.Contains(string(line), "\x00"+freeze.Role+"\x00") {
			continue
		}
		var pid, parent int
		_, rest, _ := strings.Cut(string(stat), ") ")
		if _, err := fmt.Sscanf(rest, "%c %d", new(rune), &parent); err != nil || parent != driver {
			continue
		}
		if _, err := fmt.Sscan(filepath.Base(filepath.Dir(path)), &pid); err != nil {
			return pids, err
		}
		pids = append(pids, pid)
	}
	return pids, err
}

// isFrozen reports whether the filesystem is frozen. It tries to freeze the filesystem, because the
// kernel reports a frozen filesystem only by EBUSY.
func (c *co) isFrozen(t *testing.T) bool {
	t.Helper()
	out, err := exec.Command("fsfreeze", "--freeze", c.staging()).CombinedOutput()
	if err == nil {
		testenv.Run(t, "fsfreeze", "--unfreeze", c.staging())
		return false
	}
	if !strings.Contains(string(out), "busy") {
		t.Fatalf("fsfreeze: %v: %s", err, out)
	}
	return true
}

// awaitThawed writes to the volume, which blocks until the filesystem is thawed.
func (c *co) awaitThawed(t *testing.T) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() { wrote <- c.write() }()
	must(t, poll(func(context.Context) error {
		select {
		case err := <-wrote:
			if err != nil {
				err = finalError{err}
			}
			return err
		default:
			return fmt.Errorf("the write to %s has not ended, so its filesystem is still frozen", c.target())
		}
	}))
}
