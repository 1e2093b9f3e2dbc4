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

// pod is a kubelet with a pod that describes its own volume. The kubelet makes two calls. After
// a crash it may make the call again, make the opposite call, or make no call.
type pod struct {
	host       *host
	attributes map[string]string
	published  bool
}

// The volumes of pods.
var (
	inlineImage  = map[string]string{"size": "32Mi"}
	inlineMemory = map[string]string{"size": "1Mi", "medium": "memory"}
)

// inlineRows are the points that the calls of an inline volume reach. Points between which the
// volume does not change are left out.
var inlineRows = []struct {
	call       call
	attributes map[string]string
	points     []crashpoint.Point
}{
	{publish, inlineImage, []crashpoint.Point{
		crashpoint.CreateReserved, crashpoint.CreateCommitted, crashpoint.StageHalfFormat, crashpoint.StageFormatted,
		crashpoint.StageAttached, crashpoint.StageMounted, crashpoint.StageDone, crashpoint.PublishDone,
	}},
	{publish, inlineMemory, []crashpoint.Point{crashpoint.PublishTarget, crashpoint.StageMounted, crashpoint.PublishDone}},
	{unpublish, inlineImage, []crashpoint.Point{
		crashpoint.UnpublishGone, crashpoint.UnpublishTarget, crashpoint.UnstageGone,
		crashpoint.DeleteRenamed, crashpoint.DeleteDone, crashpoint.UnpublishDone, crashpoint.ReapStarted,
	}},
	{unpublish, inlineMemory, []crashpoint.Point{crashpoint.UnpublishGone, crashpoint.UnpublishDone}},
}

// TestInlineAgain makes the interrupted call again.
func TestInlineAgain(t *testing.T) {
	t.Parallel()
	eachInlineRow(t, func(t *testing.T, p *pod, cut call) {
		must(t, p.do(cut))
	})
}

// TestInlineInstead makes the opposite call after the crash.
func TestInlineInstead(t *testing.T) {
	t.Parallel()
	eachInlineRow(t, func(t *testing.T, p *pod, cut call) {
		must(t, p.do(instead[cut][0]))
	})
}

// TestInlineForgotten makes no call: the driver removes a volume that no pod has.
func TestInlineForgotten(t *testing.T) {
	t.Parallel()
	eachInlineRow(t, func(t *testing.T, p *pod, _ call) {
		mounts, err := mountsAt(p.target())
		must(t, err)
		if len(mounts) == 0 {
			must(t, p.host.empty())
		}
	})
}

func eachInlineRow(t *testing.T, after func(t *testing.T, p *pod, cut call)) {
	t.Helper()
	for _, r := range inlineRows {
		for _, point := range r.points {
			name := string(point) // short: the driver's socket is in a folder of this name
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
				must(t, p.host.empty())
				must(t, p.do(publish, unpublish)) // the pod starts again
				must(t, p.host.empty())
				must(t, p.host.stop())
				must(t, p.host.ownsNothing())
			})
		}
	}
}

func newPod(t *testing.T, h *host, attributes map[string]string) *pod {
	t.Helper()
	p := &pod{host: h, attributes: attributes}
	must(t, os.MkdirAll(filepath.Dir(p.target()), 0o750))
	return p
}

func (p *pod) id() string { return "csi-" + strings.Repeat("0f", 32) }

func (p *pod) target() string { return p.host.path("pods/volumes/scratch/mount") }

// reach makes a call to an armed driver, which must die in it.
func (p *pod) reach(t *testing.T, one call, point crashpoint.Point) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p.host.wantCrash(t, one, point, p.attempt(ctx, one))
}

// do makes each call until it succeeds, and then checks the state.
func (p *pod) do(calls ...call) error {
	for _, one := range calls {
		err := poll(func(ctx context.Context) error { return again(p.attempt(ctx, one)) })
		if err == nil {
			err = p.check()
		}
		if err != nil {
			return fmt.Errorf("%s of an inline volume: %w", one, err)
		}
	}
	return nil
}

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

// write writes a file as the pod does. A process that is started meanwhile inherits the open
// file and keeps the mount busy.
func (p *pod) write() error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(filepath.Join(p.target(), "file"), []byte("scratch"), 0o600)
}

// check fails unless the volume has one writable mount if it is published, and none otherwise.
func (p *pod) check() error {
	if p.published {
		_, err := mountAt(p.target(), true)
		return errors.Join(err, p.write())
	}
	if _, err := os.Lstat(p.target()); !os.IsNotExist(err) {
		return fmt.Errorf("the target %s still exists (%w)", p.target(), err)
	}
	return p.host.leaks()
}
