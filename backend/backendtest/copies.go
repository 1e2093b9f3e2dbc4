package backendtest

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// testLongCopies: a copy continues after its call has ended, and a retry joins it. A call that deletes the copy,
// and a restart of the driver, stop it.
func testLongCopies(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(*driver.Options) {})
	l := newVolumeOfSize(t, d, kind, gib)
	l.stageAndPublish(t)
	fillDevice(t, l.target, 512*mib)
	l.unpublishAndUnstage(t)
	createSnapshot := func() (string, func(context.Context) (string, error)) {
		req := snapshotRequest(t, l.id)
		return "snapshots", func(ctx context.Context) (string, error) {
			resp, err := d.Control.CreateSnapshot(ctx, req)
			return resp.GetSnapshot().GetSnapshotId(), err
		}
	}
	createClone := func() (string, func(context.Context) (string, error)) {
		req := kind.copyRequest(t, fromVolume(l), gib)
		return "volumes", func(ctx context.Context) (string, error) {
			resp, err := d.Control.CreateVolume(ctx, req)
			return resp.GetVolume().GetVolumeId(), err
		}
	}
	t.Run("snapshot", func(t *testing.T) {
		testLongCopy(t, d, createSnapshot, func(id string) error {
			_, err := d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
			return err
		})
	})
	t.Run("volume", func(t *testing.T) {
		testLongCopy(t, d, createClone, func(id string) error {
			_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
			return err
		})
	})
	remove(t, d, l.id)
	d.wantEmpty(t)
}

// fillDevice writes data that is not zero to the first size bytes of a device.
func fillDevice(t *testing.T, device string, size int64) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	content := pattern(80)
	for at := int64(0); at < size; at += int64(len(content)) {
		_, err := f.WriteAt(content, at)
		must(t, err)
	}
	must(t, f.Sync())
}

// testLongCopy tests a kind of copy. request returns the folder of the pool that contains the copies, and a call
// that creates a new copy. remove deletes a copy.
func testLongCopy(t *testing.T, d *Driver, request func() (folder string, call func(context.Context) (id string, err error)), remove func(id string) error) {
	folder, call := request()
	d.beginCopy(t, call)
	var id string
	must(t, untilDone(t, func() (err error) { id, err = call(t.Context()); return err }))
	must(t, remove(id))
	prefix := id[:strings.LastIndex(id, ":")+1]
	for _, stop := range []func(name string){
		func(name string) { must(t, untilDone(t, func() error { return remove(prefix + name) })) },
		func(string) { d.Restart(t) },
	} {
		_, call := request()
		name := d.beginCopy(t, call)
		stop(name)
		await(t, "the files of the stopped copy to be removed", func() bool { return len(d.entries(t, ".trivet/tmp"))+len(d.entries(t, ".trivet/trash")) == 0 })
		if left := d.entries(t, folder); len(left) > 1 || folder == "snapshots" && len(left) > 0 {
			t.Errorf("got files %q after the copy was stopped, want only the source volume", left)
		}
	}
}

// entries returns the paths in a folder of the pool.
func (d *Driver) entries(t *testing.T, folder string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(d.Pool(), folder, "*"))
	must(t, err)
	return found
}

// beginCopy starts a call that copies, and cancels it when the first bytes are copied. It returns the name of
// the copy.
func (d *Driver) beginCopy(t *testing.T, call func(context.Context) (string, error)) (name string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answer := make(chan error, 1)
	go func() { _, err := call(ctx); answer <- err }()
	await(t, "the copy to begin", func() bool {
		for _, entry := range d.entries(t, ".trivet/tmp") {
			for _, image := range []string{"image", "0/image"} {
				var st unix.Stat_t
				if unix.Stat(filepath.Join(entry, image), &st) == nil && st.Blocks > 0 {
					name, _, _ = strings.Cut(filepath.Base(entry), ".")
				}
			}
		}
		return name != ""
	})
	cancel()
	if code := status.Code(<-answer); code != codes.Canceled && code != codes.Aborted {
		t.Errorf("the canceled call: got %v, want Canceled or Aborted", code)
	}
	return name
}

// testFreezeLimit: a volume in use is not copied if the copy takes longer than the freeze
// limit, and stays usable. A volume that another program has frozen is not copied and stays
// frozen.
func testFreezeLimit(t *testing.T, _ *Driver, kind Kind) {
	for _, limit := range []string{"0s", "1ms", "100ms"} {
		t.Run(limit, func(t *testing.T) {
			d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].FreezeLimit = limit })
			l := newVolume(t, d, kind, multiWriter)
			l.stageAndPublish(t)
			testenv.Run(t, "dd", "if=/dev/urandom", "of="+l.data(l.target), "bs=1M", "count=128", "conv=fsync", "status=none")
			r := record(t, l)
			wantNoCopy(t, l, "freezeLimit", "unstage")
			r.await(t)
			must(t, r.end())
			must(t, l.unpublishAt(t.Context(), l.target))
			await(t, "unstage to succeed after the freeze", func() bool { return l.unstage(t.Context()) == nil })
		})
	}
	t.Run("frozen", func(t *testing.T) {
		d := kind.start(t, "20G", func(*driver.Options) {})
		l := newVolume(t, d, kind, multiWriter)
		l.stageAndPublish(t)
		testenv.Run(t, "fsfreeze", "--freeze", l.target)
		wantNoCopy(t, l, "frozen")
		testenv.Run(t, "fsfreeze", "--unfreeze", l.target)
	})
}

// wantNoCopy fails the test unless a volume in use is not copied, and no files of a copy are left.
func wantNoCopy(t *testing.T, l *testVolume, says ...string) {
	t.Helper()
	d := l.d
	_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
	wantCode(t, err, codes.FailedPrecondition, says...)
	_, err = d.Control.CreateVolume(t.Context(), l.kind.copyRequest(t, fromVolume(l), 0))
	wantCode(t, err, codes.FailedPrecondition, says...)
	await(t, "the files of the refused copies to be removed", func() bool {
		return len(d.entries(t, ".trivet/tmp"))+len(d.entries(t, ".trivet/trash"))+len(d.entries(t, "snapshots")) == 0
	})
	if left := d.entries(t, "volumes"); len(left) != 1 {
		t.Errorf("got volumes %q, want only the source", left)
	}
}

// testFullPool: a copy for which the filesystem has no room fails and leaves no files.
func testFullPool(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "400M", func(o *driver.Options) { o.Config.Pools[0].Overcommit, o.Config.Pools[0].Reserve = 10, "0" })
	l := newVolumeOfSize(t, d, kind, 256*mib)
	l.stageAndPublish(t)
	fillDevice(t, l.target, 128*mib)
	l.unpublishAndUnstage(t)
	s := l.snapshot(t)
	ballast := filepath.Join(filepath.Dir(d.Pool()), "ballast")
	testenv.Run(t, "fallocate", "-l", "40M", ballast)
	before := capacity(t, d, kind)
	_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
	wantCode(t, err, codes.ResourceExhausted, "no room")
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(s), fromVolume(l)} {
		_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, of, 0))
		wantCode(t, err, codes.ResourceExhausted, "no room")
	}
	await(t, "the reservation to be released", func() bool { return capacity(t, d, kind) == before })
	await(t, "tmp and trash to be empty", func() bool { return len(d.entries(t, ".trivet/tmp"))+len(d.entries(t, ".trivet/trash")) == 0 })
	must(t, os.Remove(ballast))
}
