package loop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// In these tests other processes open a volume's loop device, as udev, blkid and backup programs do.

// place creates a volume with its own paths. It is removed when the test ends, whatever its state.
func (s *subject) place(t *testing.T, kind backendtest.Kind, name string, parameters map[string]string) *subject {
	t.Helper()
	v := *s
	v.setKind(kind.FSType)
	v.staging, v.target = t.TempDir(), filepath.Join(t.TempDir(), "target")
	must(t, v.create(t, name, 64<<20, parameters))
	t.Cleanup(func() {
		ctx := context.Background()
		unpublish, unstage := v.unpublish(ctx), v.unstage(ctx)
		if err := errors.Join(unpublish, unstage, v.erase(ctx)); err != nil {
			t.Errorf("removing %s: %v", name, err)
		}
	})
	return &v
}

// bound lists the loop devices on files whose path begins with prefix, also removed files.
func bound(prefix string) []int {
	var numbers []int
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		number, err := strconv.Atoi(strings.TrimPrefix(strings.Split(l, "/")[3], "loop"))
		if err == nil && strings.HasPrefix(sys(number, "loop/backing_file"), prefix) {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// sys reads a file of a loop device in sysfs; empty if there is none.
func sys(number int, file string) string {
	b, err := os.ReadFile(filepath.Join("/sys/block/loop"+strconv.Itoa(number), file))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func devicePath(number int) string { return "/dev/loop" + strconv.Itoa(number) }

// device is a loop device with one backing file.
type device struct {
	number int
	seq    string
}

func deviceNow(number int) device { return device{number, sys(number, "diskseq")} }

// there reports whether the device is still bound to the same image.
func (d device) there() bool {
	return sys(d.number, "loop/backing_file") != "" && sys(d.number, "diskseq") == d.seq
}

// wantThere fails the test unless the device is bound to the same image, and remains so when
// no process has it open.
func (d device) wantThere(t *testing.T) {
	t.Helper()
	if !d.there() {
		t.Errorf("%s is no longer bound", devicePath(d.number))
	}
	if a := sys(d.number, "loop/autoclear"); a != "0" {
		t.Errorf("%s has autoclear %q, want 0", devicePath(d.number), a)
	}
}

func (d device) wantGone(t *testing.T) {
	t.Helper()
	if d.there() {
		t.Errorf("%s is still bound to %s", devicePath(d.number), sys(d.number, "loop/backing_file"))
	}
}

// device returns the volume's only loop device.
func (s *subject) device(t *testing.T) device {
	t.Helper()
	numbers := bound(s.image())
	if len(numbers) != 1 {
		t.Fatalf("%s is bound to the loop devices %v, want one", s.image(), numbers)
	}
	return deviceNow(numbers[0])
}

// state returns the attributes of a bound device.
func (d device) state(t *testing.T) string {
	t.Helper()
	f, err := os.Open(devicePath(d.number))
	must(t, err)
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	must(t, err)
	text := fmt.Sprintf("%+v\n", *info)
	for _, file := range []string{
		"diskseq", "size", "ro", "loop/backing_file", "loop/autoclear", "loop/dio", "loop/partscan", "loop/offset",
		"loop/sizelimit", "queue/logical_block_size", "queue/discard_max_bytes", "queue/write_cache",
	} {
		text += file + " " + sys(d.number, file) + "\n"
	}
	return text
}

// hold opens a device until the end of the test.
func (d device) hold(t *testing.T, flag int) *os.File {
	t.Helper()
	f, err := os.OpenFile(devicePath(d.number), flag, 0)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// fill writes content to a raw device, durably.
func fill(t *testing.T, path, text string) []byte {
	t.Helper()
	content := bytes.Repeat([]byte(text+"\n"), 8192)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt(content, 0)
	must(t, err)
	must(t, f.Sync())
	return content
}

// readBack returns an error if the content at path differs.
func readBack(path string, want []byte) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	got := make([]byte, len(want))
	if n, err := f.ReadAt(got, 0); err != nil {
		return fmt.Errorf("%s: %d of %d bytes: %w", path, n, len(want), err)
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s begins with %q, want %q", path, got[:64], want[:64])
	}
	return nil
}

func wantReads(t *testing.T, path string, want []byte) {
	t.Helper()
	if err := readBack(path, want); err != nil {
		t.Error(err)
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !holds() {
		select {
		case <-deadline:
			t.Fatalf("waited in vain for %s", what)
		case <-tick.C:
		}
	}
}

// soon is a context for a call that must return within five seconds.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestUnstageBesideOpeners stages and unstages volumes while other processes briefly open their
// devices: every call succeeds after retries, and every unstage frees only its own device.
func TestUnstageBesideOpeners(t *testing.T) {
	s := start(t, "8G")
	bystander := s.place(t, backendtest.Kind{}, "bystander", nil)
	must(t, bystander.stage(t.Context()))
	must(t, bystander.publish(t.Context(), false))
	content := fill(t, bystander.target, "bystander")
	own := bystander.device(t)

	r := &cycles{deadline: time.Now().Add(8 * time.Second)}
	r.left.Store(1500)
	var volumes []*subject
	for i := range 3 {
		volumes = append(volumes,
			s.place(t, backendtest.Kind{FSType: "ext4"}, fmt.Sprintf("filesystem-%d", i), nil),
			s.place(t, backendtest.Kind{}, fmt.Sprintf("raw-%d", i), nil))
	}
	stop := make(chan struct{})
	var opener, cyclers sync.WaitGroup
	opener.Go(func() { r.open(s.pool()+"/volumes/", stop) })
	for _, v := range volumes {
		cyclers.Go(func() {
			if err := r.run(t.Context(), v); err != nil {
				r.failed.Store(true)
				t.Errorf("%s: %v", v.id, err)
			}
		})
	}
	cyclers.Wait()
	close(stop)
	opener.Wait()
	t.Logf("%d rounds, %d opens, %d retried calls", r.done.Load(), r.opens.Load(), r.again.Load())
	if r.done.Load() < 10 || r.opens.Load() < 10 {
		t.Error("the test had too few rounds or opens")
	}

	if now := bystander.device(t); now != own {
		t.Errorf("the bystander's device was %+v and is %+v", own, now)
	}
	own.wantThere(t)
	wantReads(t, bystander.target, content)
	must(t, bystander.unpublish(t.Context()))
	must(t, bystander.unstage(t.Context()))
	own.wantGone(t)
	for _, v := range append(volumes, bystander) {
		must(t, v.erase(t.Context()))
	}
	s.wantNothingLeft(t)
}

// cycles is the state of the stress test.
type cycles struct {
	deadline           time.Time
	left               atomic.Int64
	done, opens, again atomic.Int64
	failed             atomic.Bool
}

// open repeatedly opens the loop devices on files below a folder, and reads from them briefly.
func (r *cycles) open(folder string, stop <-chan struct{}) {
	buf := make([]byte, 4096)
	for {
		for _, number := range bound(folder) {
			select {
			case <-stop:
				return
			default:
			}
			// Prefer devices with autoclear: after the close another volume can get the number
			// before the unstage of this one checks it again.
			if sys(number, "loop/autoclear") != "1" && rand.IntN(4) > 0 {
				continue
			}
			hold := time.Duration(rand.IntN(400)) * time.Microsecond
			fd, err := unix.Open(devicePath(number), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil { // freed meanwhile
				continue
			}
			for begin := time.Now(); time.Since(begin) < hold; {
				_, _ = unix.Pread(fd, buf, 0)
			}
			_ = unix.Close(fd)
			r.opens.Add(1)
		}
		select {
		case <-stop:
			return
		default:
		}
	}
}

// run stages and unstages a volume until the test ends.
func (r *cycles) run(ctx context.Context, v *subject) error {
	for first := true; r.left.Add(-1) >= 0 && time.Now().Before(r.deadline) && !r.failed.Load(); first = false {
		if err := r.retry(ctx, v.stage); err != nil {
			return fmt.Errorf("stage: %w", err)
		}
		if err := v.checkOwn(first); err != nil {
			return fmt.Errorf("after stage: %w", err)
		}
		if err := r.retry(ctx, v.unstage); err != nil {
			return fmt.Errorf("unstage: %w", err)
		}
		if left := bound(v.image()); len(left) > 0 {
			return fmt.Errorf("after unstage it still has the loop devices %v", left)
		}
		r.done.Add(1)
	}
	return nil
}

// retry repeats a call that is refused until it succeeds. Any other failure is final.
func (r *cycles) retry(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var refused error
	for {
		err := call(ctx)
		switch status.Code(err) {
		case codes.OK:
			return nil
		case codes.Aborted, codes.FailedPrecondition, codes.Unavailable:
			refused = err
			r.again.Add(1)
		default:
			return errors.Join(err, refused)
		}
	}
}

// checkOwn returns an error unless the staged volume has one device and its own content. The first
// call writes the content.
func (s *subject) checkOwn(first bool) error {
	numbers := bound(s.image())
	if len(numbers) != 1 {
		return fmt.Errorf("it has the loop devices %v", numbers)
	}
	path, flag := filepath.Join(s.staging, "content"), os.O_WRONLY|os.O_CREATE
	if s.cap.GetBlock() != nil {
		path, flag = devicePath(numbers[0]), os.O_WRONLY
		if a := sys(numbers[0], "loop/autoclear"); a != "0" {
			return fmt.Errorf("%s has autoclear %q", path, a)
		}
	}
	content := bytes.Repeat([]byte(s.id+"\n"), 512)
	if !first {
		return readBack(path, content)
	}
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, f.Sync(), f.Close())
}

// TestUnstageOfOpenRawDevice: an unstage that is refused because a process has the device open
// changes nothing, and the volume remains usable.
func TestUnstageOfOpenRawDevice(t *testing.T) {
	s := start(t, "8G")
	for _, tc := range []struct {
		name       string
		flag       int
		allocation string
	}{
		{"reader", os.O_RDONLY, "thin"},
		{"writer", os.O_RDWR, "thin"},
		{"exclusive", os.O_RDONLY | os.O_EXCL, "thin"},
		{"thick", os.O_RDONLY, "thick"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := s.place(t, backendtest.Kind{}, "open-"+tc.name, map[string]string{"allocation": tc.allocation})
			must(t, v.stage(t.Context()))
			own := v.device(t)
			content := fill(t, devicePath(own.number), tc.name)
			before := own.state(t)
			refuse := func() *os.File {
				holder := own.hold(t, tc.flag)
				wantCode(t, v.unstage(soon(t)), codes.FailedPrecondition, devicePath(own.number))
				own.wantThere(t)
				if after := own.state(t); after != before {
					t.Errorf("the refused unstage changed the device from\n%s\nto\n%s", before, after)
				}
				return holder
			}
			// After the other process has closed it, the device is unchanged.
			must(t, refuse().Close())
			own.wantThere(t)
			wantReads(t, devicePath(own.number), content)

			holder := refuse()
			must(t, v.stage(t.Context()))
			must(t, v.publish(t.Context(), false))
			if now := v.device(t); now != own {
				t.Errorf("the device was %+v and is %+v", own, now)
			}
			wantReads(t, v.target, content)
			must(t, holder.Close())
			own.wantThere(t)
			wantReads(t, v.target, content)
			must(t, v.unpublish(t.Context()))
			must(t, v.unstage(t.Context()))
			own.wantGone(t)
			if left := bound(v.image()); len(left) > 0 {
				t.Errorf("after unstage it still has the loop devices %v", left)
			}
		})
	}
}

// TestRefusedUnstageOfReadOnlyRaw: a volume that is published read-only has two devices, one on
// the other. A refused unstage changes neither.
func TestRefusedUnstageOfReadOnlyRaw(t *testing.T) {
	s := start(t, "8G")
	for _, tc := range []struct {
		name    string
		restart bool
	}{{"same-driver", false}, {"restarted", true}} {
		t.Run(tc.name, func(t *testing.T) {
			v := s.place(t, backendtest.Kind{}, "readonly-"+tc.name, nil)
			must(t, v.stage(t.Context()))
			own := v.device(t)
			content := fill(t, devicePath(own.number), tc.name)
			must(t, v.publish(t.Context(), true))
			upper := nodeAt(t, v.target)
			if upper == own || sys(upper.number, "loop/backing_file") != devicePath(own.number) {
				t.Fatalf("published is %+v on %q, the volume's own is %+v", upper, sys(upper.number, "loop/backing_file"), own)
			}
			if tc.restart {
				v.Restart(t)
			}
			before, beforeUpper := own.state(t), upper.state(t)
			wantCode(t, v.unstage(soon(t)), codes.FailedPrecondition, v.target)
			own.wantThere(t)
			upper.wantThere(t)
			if after := own.state(t); after != before {
				t.Errorf("the refused unstage changed the device from\n%s\nto\n%s", before, after)
			}
			if after := upper.state(t); after != beforeUpper {
				t.Errorf("the refused unstage changed the read-only device from\n%s\nto\n%s", beforeUpper, after)
			}
			wantReads(t, v.target, content)

			must(t, v.unpublish(t.Context()))
			upper.wantGone(t)
			own.wantThere(t)
			must(t, v.publish(t.Context(), false))
			if now := nodeAt(t, v.target); now != own {
				t.Errorf("published is %+v, the volume's own is %+v", now, own)
			}
			wantReads(t, v.target, content)
			wantReads(t, v.target, fill(t, v.target, "new"))
			must(t, v.unpublish(t.Context()))
			must(t, v.unstage(t.Context()))
			own.wantGone(t)
			upper.wantGone(t)
		})
	}
}

// nodeAt returns the loop device of the device node at a path.
func nodeAt(t *testing.T, path string) device {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		t.Fatalf("%s is no block device", path)
	}
	return deviceNow(int(unix.Minor(st.Rdev)))
}

// TestDeleteAfterImageRemoved: a volume whose image was removed while it was in use is still in
// use.
func TestDeleteAfterImageRemoved(t *testing.T) {
	for _, tc := range []struct {
		name    string
		restart bool
	}{{"same-driver", false}, {"restarted", true}} {
		t.Run(tc.name, func(t *testing.T) {
			s := start(t, "8G")
			restart := func() { s.Restart(t) }
			// A volume that was never staged is not in use. To find that out the driver scans all
			// devices, and it must scan them again for the next volume.
			decoy := s.place(t, backendtest.Kind{}, "decoy", nil)
			must(t, os.Remove(decoy.image()))
			must(t, decoy.erase(t.Context()))
			for _, kind := range []backendtest.Kind{{FSType: "ext4"}, {}} {
				t.Run(kind.Name(), func(t *testing.T) {
					if !tc.restart {
						testDeleteWithoutImage(t, s, kind, func() {})
						return
					}
					testDeleteWithoutImage(t, s, kind, restart)
				})
			}
		})
	}
}

func testDeleteWithoutImage(t *testing.T, s *subject, kind backendtest.Kind, meanwhile func()) {
	v := s.place(t, kind, "removed-"+kind.Name(), nil)
	must(t, v.stage(t.Context()))
	must(t, v.publish(t.Context(), false))
	own := v.device(t)
	must(t, os.Remove(v.image()))
	meanwhile()
	folder := filepath.Dir(v.image())
	wantInUse := func(state string) {
		t.Helper()
		if err := v.erase(soon(t)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "in use") {
			t.Errorf("delete while %s: got %v, want FailedPrecondition that says \"in use\"", state, err)
		}
		for _, path := range []string{folder, filepath.Join(folder, "volume.json")} {
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("delete while %s: %v", state, err)
			}
		}
		if !own.there() {
			t.Errorf("delete while %s: %s is free", state, devicePath(own.number))
		}
	}
	wantInUse("published")
	must(t, v.unpublish(t.Context()))
	wantInUse("staged")
	must(t, v.unstage(t.Context()))
	own.wantGone(t)
	must(t, v.erase(t.Context()))
	must(t, v.erase(t.Context()))
	s.wantNothingLeft(t)
	eventually(t, "the trash to be emptied", func() bool {
		entries, err := os.ReadDir(filepath.Join(s.pool(), ".trivet/trash"))
		return err == nil && len(entries) == 0
	})
	if left := bound(folder); len(left) > 0 {
		t.Errorf("the deleted volume has the loop devices %v", left)
	}
}

// TestStageOfMarkedDevice: a device that one process cleared while another had it open is freed at
// the last close. Stage keeps it, or attaches another.
func TestStageOfMarkedDevice(t *testing.T) {
	s := start(t, "8G")
	for _, tc := range []struct {
		name       string
		allocation string
		restart    bool
		rounds     int
		beside     bool // the holder closes the device during stage, not after it
	}{
		{"thin", "thin", false, 1, false},
		{"thick", "thick", false, 1, false},
		{"restarted", "thin", true, 1, false},
		{"closed-beside", "thin", false, 200, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := s.place(t, backendtest.Kind{}, "marked-"+tc.name, map[string]string{"allocation": tc.allocation})
			must(t, v.stage(t.Context()))
			content := fill(t, devicePath(v.device(t).number), tc.name)
			discards := sys(v.device(t).number, "queue/discard_max_bytes")
			if (discards == "0") != (tc.allocation == "thick") {
				t.Fatalf("a %s volume's device takes discards of %q bytes", tc.allocation, discards)
			}
			for range tc.rounds {
				holder := v.mark(t)
				if tc.restart {
					v.Restart(t)
				}
				closed := make(chan error, 1)
				if tc.beside {
					go func() {
						wait := time.Duration(rand.IntN(2000)) * time.Microsecond
						for begin := time.Now(); time.Since(begin) < wait; {
							runtime.Gosched()
						}
						closed <- holder.Close()
					}()
				}
				must(t, v.stage(t.Context()))
				if !tc.beside {
					v.device(t).wantThere(t)
					closed <- holder.Close()
				}
				must(t, <-closed)
				own := v.device(t)
				own.wantThere(t)
				if now := sys(own.number, "queue/discard_max_bytes"); now != discards {
					t.Errorf("the device took discards of %s bytes and takes %s", discards, now)
				}
				wantReads(t, devicePath(own.number), content)
				if t.Failed() {
					return
				}
			}
			own := v.device(t)
			must(t, v.publish(t.Context(), false))
			wantReads(t, v.target, content)
			must(t, v.unpublish(t.Context()))
			own.wantThere(t)
			must(t, v.unstage(t.Context()))
			own.wantGone(t)
		})
	}
}

// mark clears the volume's device while it is open: the kernel frees it when the returned file is
// closed.
func (s *subject) mark(t *testing.T) *os.File {
	t.Helper()
	own := s.device(t)
	holder := own.hold(t, os.O_RDONLY)
	testenv.Run(t, "losetup", "-d", devicePath(own.number))
	if a := sys(own.number, "loop/autoclear"); a != "1" || !own.there() {
		t.Fatalf("%s has autoclear %q after it was cleared", devicePath(own.number), a)
	}
	if !slices.Contains(bound(s.image()), own.number) {
		t.Fatalf("%s is not the volume's any more", devicePath(own.number))
	}
	return holder
}
