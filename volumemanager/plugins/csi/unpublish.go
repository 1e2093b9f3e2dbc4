package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// unpublisher unpublishes a volume from a pod. TearDown does so for a filesystem, and UnmapPodDevice for
// a raw device.
type unpublisher struct {
	*Plugin
	name string
	pod  types.UID
}

func (p *Plugin) newUnpublisher(name string, pod types.UID) (*unpublisher, error) {
	return &unpublisher{p, name, pod}, errors.Join(plugins.CheckPart("volume name", name), plugins.CheckPart("pod UID", string(pod)))
}

// NewUnmounter validates the parts of paths.
func (p *Plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return p.newUnpublisher(name, pod)
}

// TearDown calls NodeUnpublishVolume. If the record is torn, and no other record names the volume,
// it only removes the directories, provided that they are not mounted.
func (u *unpublisher) TearDown(ctx context.Context) error {
	dir := u.podDir(u.pod, u.name)
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := u.unpublish(ctx, dir, filepath.Join(dir, podMount), u.name); err != nil {
		return err
	}
	return u.removePublished(dir)
}

// unpublish calls NodeUnpublishVolume for the volume whose record is in a directory. If no record
// identifies the volume, it makes no call, and returns an error if the target is mounted.
func (p *Plugin) unpublish(ctx context.Context, dir, target, name string) error {
	r, err := p.findRecord(dir, func(r record) bool { return r.Name == name })
	if err != nil {
		isMounted, mountErr := p.mounted(target)
		if isMounted && mountErr == nil {
			return fmt.Errorf("the volume mounted at %s is unknown, so its driver cannot unmount it: %w: unmount it by hand", target, err)
		}
		return mountErr
	}
	d, err := p.driver(r.Driver)
	if err != nil {
		return err
	}
	request := &csi.NodeUnpublishVolumeRequest{VolumeId: r.Handle, TargetPath: target}
	if _, err := call(ctx, d, d.node.NodeUnpublishVolume, request); err != nil {
		return err
	}
	return p.checkUnmounted(d.name, target)
}

// removePublished removes the directories and the record of a pod's volume.
func (p *Plugin) removePublished(dir string) error {
	if err := removeLeftover(filepath.Join(dir, podMount)); err != nil {
		return err
	}
	return p.removeRecord(dir)
}
