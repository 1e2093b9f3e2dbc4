package crash

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// pod is a kubelet with a pod that has an inline volume. The kubelet only makes the calls
// NodePublishVolume and NodeUnpublishVolume. After a crash it may repeat the call, make the other
// call, or make no call.
type pod struct {
	host       *host
	attributes map[string]string
	published  bool
}

// The attributes of the pods' volumes: a disk image, and a tmpfs.
var (
	inlineImage  = map[string]string{"size": "32Mi"}
	inlineMemory = map[string]string{"size": "1Mi", "medium": "memory"}
)

// inlineRows contains the crash points that the calls for an inline volume reach. If the volume does
// not change between several points, only one of them is a row.
var inlineRows = []struct {
	call       call
	attributes map[string]string
	points     []crashpoint.Point
}{
	{publish, inlineImage, []crashpoint.Point{
		crashpoint.CreateReserved, crashpoint.CreateHalfFormat, crashpoint.CreateCommitted,
		crashpoint.StageAttached, crashpoint.StageMounted, crashpoint.StageDone, crashpoint.PublishDone,
	}},
	{publish, inlineMemory, []crashpoint.Point{crashpoint.PublishTarget, crashpoint.StageMounted, crashpoint.PublishDone}},
	{unpublish, inlineImage, []crashpoint.Point{
		crashpoint.UnpublishGone, crashpoint.UnpublishTarget, crashpoint.UnstageGone,
		crashpoint.DeleteRenamed, crashpoint.DeleteDone, crashpoint.UnpublishDone, crashpoint.ReapStarted,
	}},
	{unpublish, inlineMemory, []crashpoint.Point{crashpoint.UnpublishGone, crashpoint.UnpublishDone}},
}

// TestInlineRetry repeats the interrupted call after the crash.
func TestInlineRetry(t *testing.T) {
	t.Parallel()
	eachInlineRow(t, func(t *testing.T, p *pod, interrupted call) {
		must(t, p.do(interrupted))
	})
}

// TestInlineUndo makes the call that undoes the interrupted call after the crash.
func TestInlineUndo(t *testing.T) {
	t.Parallel()
	eachInlineRow(t, func(t *testing.T, p *pod, interrupted call) {
		must(t, p.do(undo[interrupted][0]))
	})
}

// TestInlineForgotten makes no call after the crash. The driver removes a volume that is not mounted
// for a pod.
func TestInlineForgotten(t *testing.T) {
	t.Parallel()
	eachInlineRow(t, func(t *testing.T, p *pod, _ call) {
		mounts, err := mountsAt(p.target())
		must(t, err)
		if len(mounts) == 0 {
			must(t, p.host.awaitEmpty())
		}
	})
}

// eachInlineRow kills the driver at each point, calls after, and checks that the volume can be deleted
// and created again.
func eachInlineRow(t *testing.T, after func(t *testing.T, p *pod, interrupted call)) {
	t.Helper()
	for _, r := range inlineRows {
		for _, point := range r.points {
			name := string(point)
			if r.attributes["medium"] != "" {
				name += "-memory"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				p := newPod(t, newHost(t, "xfs", crashing, point), r.attributes)
				if r.call == unpublish {
					must(t, p.do(publish))
				}
				p.reach(t, r.call, point)
				must(t, p.host.start(""))
				after(t, p, r.call)
				must(t, p.do(unpublish))
				must(t, p.host.awaitEmpty())
				must(t, p.do(publish, unpublish)) // as if the pod were created again
				must(t, p.host.awaitEmpty())
				must(t, p.host.stop())
				must(t, p.host.wantNothingOwned())
			})
		}
	}
}

// newPod returns a pod whose volume is not published yet, and creates the parent of the target.
func newPod(t *testing.T, h *host, attributes map[string]string) *pod {
	t.Helper()
	p := &pod{host: h, attributes: attributes}
	must(t, os.MkdirAll(filepath.Dir(p.target()), 0o750))
	return p
}

// id returns a volume ID in the format of the kubelet's IDs of inline volumes.
func (p *pod) id() string { return "csi-" + strings.Repeat("0f", 32) }

func (p *pod) target() string { return p.host.path("pods/volumes/scratch/mount") }

// reach makes a call during which the driver must crash at a point.
func (p *pod) reach(t *testing.T, one call, point crashpoint.Point) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	p.host.wantCrash(t, one, point, p.attempt(ctx, one))
}

// do repeats each call until it succeeds, and then checks the state.
func (p *pod) do(calls ...call) error {
	for _, one := range calls {
		err := poll(func(ctx context.Context) error { return retryable(p.attempt(ctx, one)) })
		if err == nil {
			err = p.check()
		}
		if err != nil {
			return fmt.Errorf("%s of an inline volume: %w", one, err)
		}
	}
	return nil
}

// attempt makes a call once.
func (p *pod) attempt(ctx context.Context, what call) error {
	if what == unpublish {
		_, err := p.host.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: p.id(), TargetPath: p.target()})
		p.published = p.published && err != nil
		return err
	}
	volumeContext := map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "p"}
	maps.Copy(volumeContext, p.attributes)
	_, err := p.host.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: p.id(), TargetPath: p.target(), VolumeContext: volumeContext,
		VolumeCapability: &csi.VolumeCapability{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		},
	})
	p.published = p.published || err == nil
	return err
}

// write writes a file in the volume. It holds ForkLock, because a process that starts at the same time
// would inherit the open file for a moment and keep the mount busy.
func (p *pod) write() error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(filepath.Join(p.target(), "file"), []byte("scratch"), 0o600)
}

// check fails unless a published volume has one mount that can be written to, and an unpublished one
// has neither a mount nor a target.
func (p *pod) check() error {
	if p.published {
		_, err := mountAt(p.target(), true)
		return errors.Join(err, p.write())
	}
	if _, err := os.Lstat(p.target()); !os.IsNotExist(err) {
		return fmt.Errorf("got error %w for the target %s of an unpublished volume, want %w", err, p.target(), os.ErrNotExist)
	}
	return p.host.leaks()
}
