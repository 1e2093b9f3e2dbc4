package driver_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestForgotten: a kubelet that was killed between unpublishing and unstaging
// leaves a volume staged for ever. Deleting such a volume succeeds, and deleting
// one that anybody may still use does not.
func TestForgotten(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	testenv.Run(t, "mount", "--make-shared", dir)
	for _, name := range []string{"pods/uid/volumes", "elsewhere", "plugins/kubernetes.io/csi/csi.trivet.dev/other/globalmount"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	other, pod := filepath.Join(dir, "plugins/kubernetes.io/csi/csi.trivet.dev/other/globalmount"), filepath.Join(dir, "pods/uid/volumes/mount")
	inKubernetes := func(o *driver.Options) {
		o.PodUID, o.Config.Kubernetes = "uid", &driver.Kubernetes{KubeletDir: dir}
	}
	for name, tc := range map[string]struct {
		options  func(*driver.Options)
		kind     backendtest.Kind
		stage    string // empty: where the kubelet does
		publish  string
		attached bool
		want     codes.Code
	}{
		"forgotten":            {inKubernetes, backendtest.Kind{FSType: "ext4"}, "", "", false, codes.OK},
		"forgotten btrfs":      {inKubernetes, backendtest.Kind{FSType: "btrfs"}, "", "", false, codes.OK},
		"forgotten device":     {inKubernetes, backendtest.Kind{}, "", "", false, codes.OK},
		"published":            {inKubernetes, backendtest.Kind{FSType: "ext4"}, "", pod, false, codes.FailedPrecondition},
		"published device":     {inKubernetes, backendtest.Kind{}, "", pod, false, codes.FailedPrecondition},
		"attached":             {inKubernetes, backendtest.Kind{FSType: "ext4"}, "", "", true, codes.FailedPrecondition},
		"not by this kubelet":  {inKubernetes, backendtest.Kind{FSType: "ext4"}, filepath.Join(dir, "elsewhere"), "", false, codes.FailedPrecondition},
		"at another's path":    {inKubernetes, backendtest.Kind{FSType: "ext4"}, other, "", false, codes.FailedPrecondition},
		"not under Kubernetes": {func(*driver.Options) {}, backendtest.Kind{FSType: "ext4"}, "", "", false, codes.FailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, loop.Kind)
			tc.options(&o)
			d := backendtest.StartWith(t, o)
			c := tc.kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
			created, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
				Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 256 << 20}, VolumeCapabilities: []*csi.VolumeCapability{c},
			})
			if err != nil {
				t.Fatal(err)
			}
			v := created.GetVolume()
			if tc.stage == "" {
				tc.stage = kube.Kubelet{Dir: dir}.StagingPath(o.Name, v.GetVolumeId())
				if err := os.MkdirAll(tc.stage, 0o750); err != nil {
					t.Fatal(err)
				}
			}
			if tc.attached {
				_, err := d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: v.GetVolumeId(), NodeId: o.NodeID, VolumeCapability: c})
				if err != nil {
					t.Fatal(err)
				}
			}
			_, err = d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: tc.stage, VolumeCapability: c, VolumeContext: v.GetVolumeContext()})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { takeDown(t, d, v.GetVolumeId(), tc.stage, tc.publish) })
			if tc.publish != "" {
				_, err = d.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: tc.stage, TargetPath: tc.publish, VolumeCapability: c})
				if err != nil {
					t.Fatal(err)
				}
			}
			_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
			if status.Code(err) != tc.want {
				t.Fatalf("delete: %v, want %v", err, tc.want)
			}
			_, err = d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: v.GetVolumeId()})
			if gone := status.Code(err) == codes.NotFound; gone != (tc.want == codes.OK) {
				t.Errorf("after delete: %v", err)
			}
		})
	}
}

// TestHeldAndDeleted: what only a program has is nobody's to take away, and the
// error says how to find the program.
func TestHeldAndDeleted(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	testenv.Run(t, "mount", "--make-shared", dir)
	if err := os.MkdirAll(filepath.Join(dir, "pods/uid"), 0o750); err != nil {
		t.Fatal(err)
	}
	o := options(t, loop.Kind)
	o.PodUID, o.Config.Kubernetes = "uid", &driver.Kubernetes{KubeletDir: dir}
	d := backendtest.StartWith(t, o)
	created, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20},
		VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
	})
	if err != nil {
		t.Fatal(err)
	}
	image, err := os.Open(filepath.Join(o.Config.Pools[0].Directory.Path, "volumes/v/image"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	if err := syscall.Flock(int(image.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: created.GetVolume().GetVolumeId()})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "losetup -j "+image.Name()) {
		t.Errorf("delete: %v", err)
	}
}

// takeDown ends what is left of a volume, as a kubelet that remembers would.
func takeDown(t *testing.T, d *backendtest.Driver, id, stage, publish string) {
	ctx := context.WithoutCancel(t.Context()) // which has ended by now
	if publish != "" {
		if _, err := d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: publish}); err != nil {
			t.Error(err)
		}
	}
	if _, err := d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: stage}); err != nil {
		t.Error(err)
	}
}
