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

// bulk is so much that its copy can be seen under way, in bytes.
const bulk = 128 << 20

// newBulk makes a volume with that much in it, in a pool where nothing is shared, and
// takes it along a path after that.
func newBulk(t *testing.T, k kind, path ...call) *co {
	t.Helper()
	h := newHost(t, "ext4", crashing, "")
	c, err := newCO(h, "pvc-1", k)
	must(t, err)
	c.size, c.data = 2*bulk, make([]byte, bulk)
	_, _ = rand.Read(c.data) // never fails
	must(t, c.do(create, attach, stage, publish, write))
	must(t, c.do(path...))
	return c
}

var unused = []call{unpublish, unstage, detached}

// TestKilledInSnapshot kills the driver in the middle of a copy: nothing is left of it,
// and it can be made again.
func TestKilledInSnapshot(t *testing.T) {
	t.Parallel()
	c := newBulk(t, block, unused...)
	c.killWhile(t, cut, func() bool { c.host.kill(); return true })
	must(t, c.host.start(""))
	must(t, errors.Join(c.checkSnapshots(), c.nothingHalfMade()))
	must(t, c.do(cut))
	c.finish(t)
}

// TestKilledInRestore is the same for a volume that is made of a snapshot.
func TestKilledInRestore(t *testing.T) {
	t.Parallel()
	origin := newBulk(t, block, append(unused, cut)...)
	must(t, origin.do(remove))
	c, err := origin.restored(0, "pvc-2")
	must(t, err)
	c.origin = origin
	c.killWhile(t, create, func() bool { c.host.kill(); return true })
	must(t, c.host.start(""))
	must(t, errors.Join(emptyDir(filepath.Join(c.host.pool, "volumes")), c.nothingHalfMade()))
	must(t, c.do(create))
	c.finish(t)
}

// TestThawedWithoutDriver kills a driver that has a filesystem frozen: who writes there
// goes on without one.
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
				must(t, c.do(cut))
				c.finish(t)
			})
		}
	}
}

// TestThawedByNextDriver kills the driver and what would thaw in its place, at once.
func TestThawedByNextDriver(t *testing.T) {
	t.Parallel()
	c := newBulk(t, ext4)
	t.Cleanup(func() { _ = exec.Command("fsfreeze", "--unfreeze", c.staging()).Run() }) // if it failed
	c.killWhile(t, cut, func() bool {
		must(t, c.host.killBoth())
		return c.isFrozen(t)
	})
	must(t, c.host.start(""))
	c.awaitThawed(t)
	must(t, c.nothingHalfMade())
	must(t, c.do(cut))
	c.finish(t)
}

// killWhile makes a call that copies, and has kill end the driver when there is something
// of the copy. It begins anew when the call was quicker, or kill says that it was.
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
		must(t, c.do(instead[what]...))
	}
	t.Fatalf("%s was not caught in the middle of its copy", what)
}

// copying is nil when an image is being copied, or the call that does so has ended.
func (c *co) copying(answered <-chan error) error {
	if len(answered) > 0 {
		return nil
	}
	for _, pattern := range []string{".trivet/tmp/*/image", ".trivet/tmp/*/0/image"} {
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
	return errors.New("nothing is copied")
}

// nothingHalfMade waits until all is cleared that a killed driver was making.
func (c *co) nothingHalfMade() error {
	return poll(func(context.Context) error { return emptyDir(filepath.Join(c.host.pool, ".trivet/tmp")) })
}

// killBoth kills the driver and its guardian, of which neither sees the other die.
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

// stopped is nil when all threads of a process are (proc_pid_stat(5)).
func stopped(pid int) error {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return finalError{err}
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // it has ended
		}
		if _, rest, _ := strings.Cut(string(b), ") "); !strings.HasPrefix(rest, "T") {
			return fmt.Errorf("%s: %s", task, rest)
		}
	}
	return nil
}

// guardiansOf finds the processes that thaw for a driver.
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

// isFrozen asks the kernel, which has no other way to tell: a second freeze is EBUSY.
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

// awaitThawed writes to the volume, which waits for as long as it is frozen.
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
			return fmt.Errorf("%s is frozen", c.target())
		}
	}))
}
