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

type unmounter struct {
	*Plugin
	name string
	pod  types.UID
}

// NewUnmounter checks what paths are made of.
func (p *Plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	if err := errors.Join(plugins.CheckPart("volume name", name), plugins.CheckPart("pod UID", string(pod))); err != nil {
		return nil, err
	}
	return &unmounter{p, name, pod}, nil
}

// TearDown is NodeUnpublishVolume. If the record is torn, and no other tells of the volume,
// the driver cannot be told; what was made here goes if nothing is mounted.
func (u *unmounter) TearDown(ctx context.Context) error {
	dir := u.podDir(u.pod, u.name)
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := u.unpublish(ctx, dir, filepath.Join(dir, podMount), u.name); err != nil {
		return err
	}
	return u.unpublished(dir)
}

// unpublish makes a driver take a target path away that the record in a directory tells
// of.
func (p *Plugin) unpublish(ctx context.Context, dir, target, name string) error {
	r, err := p.find(dir, func(r record) bool { return r.Name == name })
	if err != nil {
		return p.unknownAt(target, err)
	}
	d, err := p.driver(r.Driver)
	if err != nil {
		return err
	}
	request := &csi.NodeUnpublishVolumeRequest{VolumeId: r.Handle, TargetPath: target}
	if _, err := call(ctx, d, d.node.NodeUnpublishVolume, request); err != nil {
		return err
	}
	return p.checkGone(d.name, target)
}

// unknownAt is an error if a volume is mounted that nothing tells of.
func (p *Plugin) unknownAt(target string, torn error) error {
	is, err := p.mounted(target)
	if err == nil && is {
		err = fmt.Errorf("which volume is mounted at %s is not known, and its driver cannot be told: %w: unmount it by hand", target, torn)
	}
	return err
}

// unpublished removes what was made for a pod's volume.
func (p *Plugin) unpublished(dir string) error {
	if err := removeLeft(filepath.Join(dir, podMount)); err != nil {
		return err
	}
	return p.forget(dir)
}
