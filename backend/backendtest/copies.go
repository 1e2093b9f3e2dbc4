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

// testLongCopies: a copy outlives its call. The retry joins it. A call that deletes the copy
// ends it.
func testLongCopies(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(*driver.Options) {})
	l := newSized(t, d, kind, gib)
	l.up(t)
	fillDevice(t, l.target, 512*mib)
	l.down(t)
	snapshot := func() (string, func(context.Context) (string, error)) {
		req := snapshotRequest(t, l.id)
		return "snapshots", func(ctx context.Context) (string, error) {
			resp, err := d.Control.CreateSnapshot(ctx, req)
			return resp.GetSnapshot().GetSnapshotId(), err
		}
	}
	clone := func() (string, func(context.Context) (string, error)) {
		req := kind.copyRequest(t, fromVolume(l), gib)
		return "volumes", func(ctx context.Context) (string, error) {
			resp, err := d.Control.CreateVolume(ctx, req)
			return resp.GetVolume().GetVolumeId(), err
		}
	}
	t.Run("snapshot", func(t *testing.T) {
		testLongCopy(t, d, snapshot, func(id string) error {
			_, err := d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
			return err
		})
	})
	t.Run("volume", func(t *testing.T) {
		testLongCopy(t, d, clone, func(id string) error {
			_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
			return err
		})
	})
	remove(t, d, l.id)
	d.wantEmpty(t)
}

// fillDevice writes unique content to the first bytes of a device.
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

func testLongCopy(t *testing.T, d *Driver, request func() (folder string, call func(context.Context) (id string, err error)), drop func(id string) error) {
	folder, call := request()
	d.begin(t, call)
	var id string
	must(t, untilDone(t, func() (err error) { id, err = call(t.Context()); return err }))
	must(t, drop(id))
	prefix := id[:strings.LastIndex(id, ":")+1]
	for _, stop := range []func(name string){
		func(name string) { must(t, untilDone(t, func() error { return drop(prefix + name) })) },
		func(string) { d.Restart(t) },
	} {
		_, call := request()
		name := d.begin(t, call)
		stop(name)
		await(t, "nothing of the copy", func() bool { return len(d.under(t, ".trivet/tmp"))+len(d.under(t, ".trivet/trash")) == 0 })
		if left := d.under(t, folder); len(left) > 1 || folder == "snapshots" && len(left) > 0 {
			t.Errorf("of a copy that was stopped there is %q", left)
		}
	}
}

func (d *Driver) under(t *testing.T, folder string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(d.Pool(), folder, "*"))
	must(t, err)
	return found
}

// begin makes a call that copies, and cancels it when the first bytes are copied. It returns
// the name of the copy.
func (d *Driver) begin(t *testing.T, call func(context.Context) (string, error)) (name string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answer := make(chan error, 1)
	go func() { _, err := call(ctx); answer <- err }()
	await(t, "the copy to begin", func() bool {
		for _, entry := range d.under(t, ".trivet/tmp") {
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
		t.Errorf("a call that is given up ends with %v", code)
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
			l := newLife(t, d, kind, multiWriter)
			l.up(t)
			testenv.Run(t, "dd", "if=/dev/urandom", "of="+l.data(l.target), "bs=1M", "count=128", "conv=fsync", "status=none")
			r := record(t, l)
			wantNoCopy(t, l, "freezeLimit", "unstage")
			r.await(t)
			must(t, r.end())
			must(t, l.unpublishAt(t.Context(), l.target))
			await(t, "the guardian to let go", func() bool { return l.unstage(t.Context()) == nil })
		})
	}
	t.Run("frozen", func(t *testing.T) {
		d := kind.start(t, "20G", func(*driver.Options) {})
		l := newLife(t, d, kind, multiWriter)
		l.up(t)
		testenv.Run(t, "fsfreeze", "--freeze", l.target)
		wantNoCopy(t, l, "frozen")
		testenv.Run(t, "fsfreeze", "--unfreeze", l.target)
	})
}

// wantNoCopy fails the test unless a volume in use cannot be copied.
func wantNoCopy(t *testing.T, l *life, says ...string) {
	t.Helper()
	d := l.d
	_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
	wantCode(t, err, codes.FailedPrecondition, says...)
	_, err = d.Control.CreateVolume(t.Context(), l.kind.copyRequest(t, fromVolume(l), 0))
	wantCode(t, err, codes.FailedPrecondition, says...)
	await(t, "nothing of the copies", func() bool {
		return len(d.under(t, ".trivet/tmp"))+len(d.under(t, ".trivet/trash"))+len(d.under(t, "snapshots")) == 0
	})
	if left := d.under(t, "volumes"); len(left) != 1 {
		t.Errorf("there are the volumes %q", left)
	}
}

// testFullPool: a copy for which the disk has no room leaves nothing.
func testFullPool(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "400M", func(o *driver.Options) { o.Config.Pools[0].Overcommit, o.Config.Pools[0].Reserve = 10, "0" })
	l := newSized(t, d, kind, 256*mib)
	l.up(t)
	fillDevice(t, l.target, 128*mib)
	l.down(t)
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
	await(t, "tmp and trash to be empty", func() bool { return len(d.under(t, ".trivet/tmp"))+len(d.under(t, ".trivet/trash")) == 0 })
	must(t, os.Remove(ballast))
}
