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
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// In these tests other processes open a volume's loop device, as udev, blkid and backup programs do.

// volume creates a volume with its own staging and target paths. It is unpublished, unstaged and deleted
// when the test ends.
func (s *subject) volume(t *testing.T, kind backendtest.Kind, name string, parameters map[string]string) *subject {
	t.Helper()
	v := *s
	v.setKind(kind.FSType)
	v.staging, v.target = t.TempDir(), filepath.Join(t.TempDir(), "target")
	must(t, v.create(t, name, 64<<20, parameters))
	t.Cleanup(func() {
		ctx := context.Background()
		unpublish, unstage := v.unpublish(ctx), v.unstage(ctx)
		if err := errors.Join(unpublish, unstage, v.delete(ctx)); err != nil {
			t.Errorf("cleaning up %s: %v", name, err)
		}
	})
	return &v
}

// bound lists the loop devices that are bound to files whose path begins with prefix. The files may be
// removed.
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

// device is a loop device. seq changes when the device is bound to another file.
type device struct {
	number int
	seq    string
}

func deviceNow(number int) device { return device{number, sys(number, "diskseq")} }

// isBound reports whether the device is still bound to the same file.
func (d device) isBound() bool {
	return sys(d.number, "loop/backing_file") != "" && sys(d.number, "diskseq") == d.seq
}

// wantBound fails the test unless the device is bound to the same file, and stays bound when no process
// has it open.
func (d device) wantBound(t *testing.T) {
	t.Helper()
	if !d.isBound() {
		t.Errorf("%s is no longer bound", blockdev.LoopPath(d.number))
	}
	if a := sys(d.number, "loop/autoclear"); a != "0" {
		t.Errorf("%s has autoclear %q, want 0", blockdev.LoopPath(d.number), a)
	}
}

// wantFree fails the test if the device is still bound to the same file.
func (d device) wantFree(t *testing.T) {
	t.Helper()
	if d.isBound() {
		t.Errorf("%s is still bound to %s", blockdev.LoopPath(d.number), sys(d.number, "loop/backing_file"))
	}
}

// device returns the volume's only loop device.
func (s *subject) device(t *testing.T) device {
	t.Helper()
	numbers := bound(s.image())
	if len(numbers) != 1 {
		t.Fatalf("loop devices of %s: got %v, want one", s.image(), numbers)
	}
	return deviceNow(numbers[0])
}

// state returns the attributes of a bound device.
func (d device) state(t *testing.T) string {
	t.Helper()
	f, err := os.Open(blockdev.LoopPath(d.number))
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
	f, err := os.OpenFile(blockdev.LoopPath(d.number), flag, 0)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// fill durably writes repeated text to a raw device, and returns what it wrote.
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

// wantReads fails the test if the content at path differs.
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
	deadline := time.After(hang)
	for !holds() {
		select {
		case <-deadline:
			t.Fatalf("timed out waiting for %s", what)
		case <-tick.C:
		}
	}
}

// hang is longer than any call takes that does not hang.
const hang = time.Minute

// soon is a context for a call that must not hang.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), hang)
	t.Cleanup(cancel)
	return ctx
}

// TestUnstageBesideOpeners: if other processes briefly open the devices of volumes, staging and unstaging
// succeeds after retries, and an unstage frees only the volume's own device.
func TestUnstageBesideOpeners(t *testing.T) {
	s := start(t, "8G")
	bystander := s.volume(t, backendtest.Kind{}, "bystander", nil)
	must(t, bystander.stage(t.Context()))
	must(t, bystander.publish(t.Context(), false))
	content := fill(t, bystander.target, "bystander")
	own := bystander.device(t)

	r := &stress{deadline: time.Now().Add(8 * time.Second)}
	r.left.Store(1500)
	var volumes []*subject
	for i := range 3 {
		volumes = append(volumes,
			s.volume(t, backendtest.Kind{FSType: "ext4"}, fmt.Sprintf("filesystem-%d", i), nil),
			s.volume(t, backendtest.Kind{}, fmt.Sprintf("raw-%d", i), nil))
	}
	stop := make(chan struct{})
	var opener, stagers sync.WaitGroup
	opener.Go(func() { r.open(s.pool()+"/volumes/", stop) })
	for _, v := range volumes {
		stagers.Go(func() {
			if err := r.run(t.Context(), v); err != nil {
				r.failed.Store(true)
				t.Errorf("%s: %v", v.id, err)
			}
		})
	}
	stagers.Wait()
	close(stop)
	opener.Wait()
	t.Logf("%d rounds, %d opens, %d retried calls", r.done.Load(), r.opens.Load(), r.retried.Load())
	if r.done.Load() < 10 || r.opens.Load() < 10 {
		t.Error("got fewer than 10 rounds or opens, so this test proves little")
	}

	if now := bystander.device(t); now != own {
		t.Errorf("device of the bystander: got %+v, want %+v as before", now, own)
	}
	own.wantBound(t)
	wantReads(t, bystander.target, content)
	must(t, bystander.unpublish(t.Context()))
	must(t, bystander.unstage(t.Context()))
	own.wantFree(t)
	for _, v := range append(volumes, bystander) {
		must(t, v.delete(t.Context()))
	}
	s.wantNothingLeft(t)
}

// stress is the state of TestUnstageBesideOpeners. The test ends at the deadline, when no rounds are left,
// or after a failure. A round is one stage and unstage of one volume.
type stress struct {
	deadline             time.Time
	left                 atomic.Int64 // rounds
	done, opens, retried atomic.Int64
	failed               atomic.Bool
}

// open repeatedly opens the loop devices on files below a folder, and reads from them briefly.
func (r *stress) open(folder string, stop <-chan struct{}) {
	buf := make([]byte, 4096)
	for {
		for _, number := range bound(folder) {
			select {
			case <-stop:
				return
			default:
			}
			// Prefer devices with autoclear: after the close another volume can get the device number
			// before the unstage of this volume checks the device again.
			if sys(number, "loop/autoclear") != "1" && rand.IntN(4) > 0 {
				continue
			}
			hold := time.Duration(rand.IntN(400)) * time.Microsecond
			fd, err := unix.Open(blockdev.LoopPath(number), unix.O_RDONLY|unix.O_CLOEXEC, 0)
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
func (r *stress) run(ctx context.Context, v *subject) error {
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
			return fmt.Errorf("loop devices after unstage: got %v, want none", left)
		}
		r.done.Add(1)
	}
	return nil
}

// retry repeats a call until it succeeds. It returns an error that does not mean that the call was only
// refused for now.
func (r *stress) retry(ctx context.Context, call func(context.Context) error) error {
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
			r.retried.Add(1)
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
		return fmt.Errorf("loop devices: got %v, want one", numbers)
	}
	path, flag := filepath.Join(s.staging, "content"), os.O_WRONLY|os.O_CREATE
	if s.cap.GetBlock() != nil {
		path, flag = blockdev.LoopPath(numbers[0]), os.O_WRONLY
		if a := sys(numbers[0], "loop/autoclear"); a != "0" {
			return fmt.Errorf("%s has autoclear %q, want 0", path, a)
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
		{"exclusive-reader", os.O_RDONLY | os.O_EXCL, "thin"},
		{"reader-of-thick-volume", os.O_RDONLY, "thick"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := s.volume(t, backendtest.Kind{}, "open-"+tc.name, map[string]string{"allocation": tc.allocation})
			must(t, v.stage(t.Context()))
			own := v.device(t)
			content := fill(t, blockdev.LoopPath(own.number), tc.name)
			before := own.state(t)
			refuse := func() *os.File {
				holder := own.hold(t, tc.flag)
				wantCode(t, v.unstage(soon(t)), codes.FailedPrecondition, blockdev.LoopPath(own.number))
				own.wantBound(t)
				if after := own.state(t); after != before {
					t.Errorf("the refused unstage changed the device from\n%s\nto\n%s", before, after)
				}
				return holder
			}
			// After the other process has closed the device, it is unchanged.
			must(t, refuse().Close())
			own.wantBound(t)
			wantReads(t, blockdev.LoopPath(own.number), content)

			holder := refuse()
			must(t, v.stage(t.Context()))
			must(t, v.publish(t.Context(), false))
			if now := v.device(t); now != own {
				t.Errorf("device after another stage: got %+v, want %+v as before", now, own)
			}
			wantReads(t, v.target, content)
			must(t, holder.Close())
			own.wantBound(t)
			wantReads(t, v.target, content)
			must(t, v.unpublish(t.Context()))
			must(t, v.unstage(t.Context()))
			own.wantFree(t)
			if left := bound(v.image()); len(left) > 0 {
				t.Errorf("loop devices after unstage: got %v, want none", left)
			}
		})
	}
}

// TestRefusedUnstageOfReadOnlyRaw: a volume that is published read-only has two devices, the read-only
// one on top of the volume's own. A refused unstage changes neither.
func TestRefusedUnstageOfReadOnlyRaw(t *testing.T) {
	s := start(t, "8G")
	for _, tc := range []struct {
		name    string
		restart bool
	}{{"same-driver", false}, {"restarted", true}} {
		t.Run(tc.name, func(t *testing.T) {
			v := s.volume(t, backendtest.Kind{}, "readonly-"+tc.name, nil)
			must(t, v.stage(t.Context()))
			own := v.device(t)
			content := fill(t, blockdev.LoopPath(own.number), tc.name)
			must(t, v.publish(t.Context(), true))
			upper := nodeAt(t, v.target)
			if upper == own || sys(upper.number, "loop/backing_file") != blockdev.LoopPath(own.number) {
				t.Fatalf("published device: got %+v bound to %q, want another device bound to %+v", upper, sys(upper.number, "loop/backing_file"), own)
			}
			if tc.restart {
				v.Restart(t)
			}
			before, beforeUpper := own.state(t), upper.state(t)
			wantCode(t, v.unstage(soon(t)), codes.FailedPrecondition, v.target)
			own.wantBound(t)
			upper.wantBound(t)
			if after := own.state(t); after != before {
				t.Errorf("the refused unstage changed the device from\n%s\nto\n%s", before, after)
			}
			if after := upper.state(t); after != beforeUpper {
				t.Errorf("the refused unstage changed the read-only device from\n%s\nto\n%s", beforeUpper, after)
			}
			wantReads(t, v.target, content)

			must(t, v.unpublish(t.Context()))
			upper.wantFree(t)
			own.wantBound(t)
			must(t, v.publish(t.Context(), false))
			if now := nodeAt(t, v.target); now != own {
				t.Errorf("published device: got %+v, want the volume's own %+v", now, own)
			}
			wantReads(t, v.target, content)
			wantReads(t, v.target, fill(t, v.target, "new"))
			must(t, v.unpublish(t.Context()))
			must(t, v.unstage(t.Context()))
			own.wantFree(t)
			upper.wantFree(t)
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

// TestDeleteAfterImageRemoved: a volume whose image was removed while a device was bound to it still
// counts as in use.
func TestDeleteAfterImageRemoved(t *testing.T) {
	for _, tc := range []struct {
		name    string
		restart bool
	}{{"same-driver", false}, {"restarted", true}} {
		t.Run(tc.name, func(t *testing.T) {
			s := start(t, "8G")
			afterRemoval := func() {}
			if tc.restart {
				afterRemoval = func() { s.Restart(t) }
			}
			// The driver scans all devices to find out that a volume that was never staged is not in
			// use, and it must scan them again for the next volume.
			decoy := s.volume(t, backendtest.Kind{}, "decoy", nil)
			must(t, os.Remove(decoy.image()))
			must(t, decoy.delete(t.Context()))
			for _, kind := range []backendtest.Kind{{FSType: "ext4"}, {}} {
				t.Run(kind.Name(), func(t *testing.T) { testDeleteWithoutImage(t, s, kind, afterRemoval) })
			}
		})
	}
}

// testDeleteWithoutImage removes the image of a published volume. The volume can be deleted only after it is
// unpublished and unstaged.
func testDeleteWithoutImage(t *testing.T, s *subject, kind backendtest.Kind, afterRemoval func()) {
	v := s.volume(t, kind, "removed-"+kind.Name(), nil)
	must(t, v.stage(t.Context()))
	must(t, v.publish(t.Context(), false))
	own := v.device(t)
	must(t, os.Remove(v.image()))
	afterRemoval()
	folder := filepath.Dir(v.image())
	wantInUse := func(state string) {
		t.Helper()
		if err := v.delete(soon(t)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "in use") {
			t.Errorf("delete while %s: got %v, want FailedPrecondition that contains \"in use\"", state, err)
		}
		for _, path := range []string{folder, filepath.Join(folder, "volume.json")} {
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("delete while %s: %v", state, err)
			}
		}
		if !own.isBound() {
			t.Errorf("delete while %s: %s is free", state, blockdev.LoopPath(own.number))
		}
	}
	wantInUse("published")
	must(t, v.unpublish(t.Context()))
	wantInUse("staged")
	must(t, v.unstage(t.Context()))
	own.wantFree(t)
	must(t, v.delete(t.Context()))
	must(t, v.delete(t.Context()))
	s.wantNothingLeft(t)
	eventually(t, "the trash to be emptied", func() bool {
		entries, err := os.ReadDir(filepath.Join(s.pool(), ".trivet/trash"))
		return err == nil && len(entries) == 0
	})
	if left := bound(folder); len(left) > 0 {
		t.Errorf("loop devices of the deleted volume: got %v, want none", left)
	}
}

// TestStageOfMarkedDevice: if a process detaches a device while another has it open, the kernel marks it
// with autoclear and frees it at the last close. Stage removes the mark, or binds another device.
func TestStageOfMarkedDevice(t *testing.T) {
	s := start(t, "8G")
	for _, tc := range []struct {
		name       string
		allocation string
		restart    bool
		rounds     int
		concurrent bool // the other process closes the device during stage, not after it
	}{
		{"thin", "thin", false, 1, false},
		{"thick", "thick", false, 1, false},
		{"restarted", "thin", true, 1, false},
		{"closed-during-stage", "thin", false, 200, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := s.volume(t, backendtest.Kind{}, "marked-"+tc.name, map[string]string{"allocation": tc.allocation})
			must(t, v.stage(t.Context()))
			content := fill(t, blockdev.LoopPath(v.device(t).number), tc.name)
			discards := sys(v.device(t).number, "queue/discard_max_bytes")
			if (discards == "0") != (tc.allocation == "thick") {
				t.Fatalf("device of a %s volume: got discard_max_bytes %q, want 0 only for thick", tc.allocation, discards)
			}
			for range tc.rounds {
				holder := v.mark(t)
				if tc.restart {
					v.Restart(t)
				}
				closed := make(chan error, 1)
				if tc.concurrent {
					go func() {
						wait := time.Duration(rand.IntN(2000)) * time.Microsecond
						for begin := time.Now(); time.Since(begin) < wait; {
							runtime.Gosched()
						}
						closed <- holder.Close()
					}()
				}
				must(t, v.stage(t.Context()))
				if !tc.concurrent {
					v.device(t).wantBound(t)
					closed <- holder.Close()
				}
				must(t, <-closed)
				own := v.device(t)
				own.wantBound(t)
				if now := sys(own.number, "queue/discard_max_bytes"); now != discards {
					t.Errorf("discard_max_bytes: got %s, want %s as before", now, discards)
				}
				wantReads(t, blockdev.LoopPath(own.number), content)
				if t.Failed() {
					return
				}
			}
			own := v.device(t)
			must(t, v.publish(t.Context(), false))
			wantReads(t, v.target, content)
			must(t, v.unpublish(t.Context()))
			own.wantBound(t)
			must(t, v.unstage(t.Context()))
			own.wantFree(t)
		})
	}
}

// mark detaches the volume's device while it is open. The kernel marks the device with autoclear, and
// frees it when the returned file is closed.
func (s *subject) mark(t *testing.T) *os.File {
	t.Helper()
	own := s.device(t)
	holder := own.hold(t, os.O_RDONLY)
	testenv.Run(t, "losetup", "-d", blockdev.LoopPath(own.number))
	if a := sys(own.number, "loop/autoclear"); a != "1" || !own.isBound() {
		t.Fatalf("%s: got autoclear %q, bound %t; want 1 and true", blockdev.LoopPath(own.number), a, own.isBound())
	}
	if !slices.Contains(bound(s.image()), own.number) {
		t.Fatalf("%s is no longer bound to the volume's image", blockdev.LoopPath(own.number))
	}
	return holder
}
