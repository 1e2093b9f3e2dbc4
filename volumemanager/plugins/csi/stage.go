package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// NeedsDeviceMount tells whether the driver stages. A raw device always has a record for
// all pods.
func (p *Plugin) NeedsDeviceMount(spec *plugins.Spec) (bool, error) {
	if spec.PersistentVolume == nil {
		return false, nil
	}
	if spec.Block() {
		return true, nil
	}
	d, err := p.driver(driverOf(spec))
	if err != nil {
		return false, err
	}
	return d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME), nil
}

// VolumeName is the driver and the handle, as the kubelet joins them.
func (p *Plugin) VolumeName(spec *plugins.Spec) (string, error) {
	if dir, ok := lostDir(spec); ok {
		return dir, nil
	}
	v, err := persistentVolume(spec)
	if err != nil {
		return "", err
	}
	return volumeName(v.driver, v.handle), nil
}

func volumeName(driver, handle string) string { return driver + "^" + handle }

// DeviceMountPath is the staging path.
func (p *Plugin) DeviceMountPath(spec *plugins.Spec) (string, error) {
	v, err := newVolume(spec, nil)
	if err != nil {
		return "", err
	}
	staging, _ := p.place(v)
	return staging, nil
}

// MountDevice is NodeStageVolume. A driver may stage without a mount (csi-spec), so none is
// looked for.
func (p *Plugin) MountDevice(ctx context.Context, spec *plugins.Spec, attachment plugins.Attachment, args plugins.MounterArgs) error {
	v, err := newVolume(spec, nil)
	if err != nil {
		return err
	}
	d, err := p.driver(v.driver)
	if err != nil {
		return err
	}
	request, err := p.stageRequest(d, v, attachment, args)
	if err != nil {
		return err
	}
	staging, data := p.place(v)
	fresh, err := p.remember(data, record{Name: v.name, Handle: v.handle, Driver: v.driver})
	if err != nil || !d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
		return err
	}
	undo := func() error { return p.unplace(staging, data) }
	if err := makeDirs(staging); err != nil {
		return p.settle(err, fresh, staging, undo)
	}
	if _, err := call(ctx, d, d.node.NodeStageVolume, request); err != nil {
		return p.settle(err, fresh, staging, undo)
	}
	return nil
}

func (p *Plugin) stageRequest(d *driver, v *volume, attachment plugins.Attachment, args plugins.MounterArgs) (*csi.NodeStageVolumeRequest, error) {
	secrets, err := p.secret(v.persistent.NodeStageSecretRef)
	if err != nil {
		return nil, err
	}
	staging, _ := p.place(v)
	return &csi.NodeStageVolumeRequest{
		VolumeId:          v.handle,
		PublishContext:    attachment,
		StagingTargetPath: staging,
		VolumeCapability:  v.capability(d.nodeCan(csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), d.groupFor(args)),
		Secrets:           secrets,
		VolumeContext:     v.attributes,
	}, nil
}

// groupFor is the fsGroup that the driver itself applies; nil if it does not.
func (d *driver) groupFor(args plugins.MounterArgs) *int64 {
	if d.nodeCan(csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP) {
		return args.FSGroup
	}
	return nil
}

// UnmountDevice is NodeUnstageVolume, also for a driver that stages no more if something
// is mounted. Of a volume whose record is torn, and that no other record tells of, the
// driver cannot be told: its directories go if nothing is mounted there.
func (p *Plugin) UnmountDevice(ctx context.Context, spec *plugins.Spec) error {
	if dir, ok := lostDir(spec); ok {
		return p.unmountLost(dir)
	}
	v, err := newVolume(spec, nil)
	if err != nil {
		return err
	}
	staging, data := p.place(v)
	if _, err := os.Lstat(data); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	d, err := p.driver(v.driver)
	if err != nil {
		return err
	}
	is, err := p.mounted(staging)
	if err != nil {
		return err
	}
	if is || d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
		request := &csi.NodeUnstageVolumeRequest{VolumeId: v.handle, StagingTargetPath: staging}
		if _, err := call(ctx, d, d.node.NodeUnstageVolume, request); err != nil {
			return err
		}
	}
	if err := p.checkGone(v.driver, staging); err != nil {
		return err
	}
	return p.unplace(staging, data)
}

// unplace removes what was made for a staged volume: its directories and its record.
func (p *Plugin) unplace(staging, data string) error {
	if err := removeLeft(staging); err != nil {
		return err
	}
	if err := p.forget(data); err != nil {
		return err
	}
	// The one above goes with the last volume in it.
	_ = os.Remove(filepath.Dir(data))
	return nil
}

// unmountLost leaves alone what has its record by now: it was about to be written when the
// directory was found.
func (p *Plugin) unmountLost(dir string) error {
	p.recording.Lock()
	defer p.recording.Unlock()
	if _, err := readRecord(dir); err == nil {
		return nil
	}
	staging := p.stagedAt(dir)
	is, err := p.mounted(staging)
	if err != nil {
		return err
	}
	if is {
		return fmt.Errorf("%s is missing or torn: which volume is mounted at %s is not known, and its driver cannot be told: unmount it and remove %s by hand", filepath.Join(dir, recordFile), staging, dir)
	}
	return p.unplace(staging, dir)
}

// stagedAt is the staging path of what has its record in a directory.
func (p *Plugin) stagedAt(dir string) string {
	if filepath.Base(dir) == dataDir {
		return p.stagedDevice(filepath.Base(filepath.Dir(dir)))
	}
	return filepath.Join(dir, globalMount)
}

// DeviceMounts are the volumes with a record, and those with the place for one.
func (p *Plugin) DeviceMounts() ([]plugins.DeviceMount, error) {
	dirs, err := p.recordDirs()
	if err != nil {
		return nil, err
	}
	var all []plugins.DeviceMount
	for _, dir := range dirs {
		all = append(all, p.deviceMount(dir))
	}
	return all, nil
}

func (p *Plugin) deviceMount(dir string) plugins.DeviceMount {
	block := filepath.Base(dir) == dataDir
	r, err := p.find(dir, func(r record) bool {
		if block {
			return dir == p.deviceData(r.Name)
		}
		return dir == p.stagedDir(r.Driver, r.Handle)
	})
	if err != nil && !block {
		r, err = p.publishedFrom(dir, err)
	}
	if err != nil {
		return plugins.DeviceMount{VolumeName: dir, Spec: lost(dir), Block: block}
	}
	if block { // a kubelet's record may have no name
		r.Name = filepath.Base(filepath.Dir(dir))
	}
	return plugins.DeviceMount{VolumeName: volumeName(r.Driver, r.Handle), Spec: r.spec(block), Block: block}
}

// publishedFrom is the record of a pod whose volume is staged in a directory that has none:
// its name is made of driver and handle. Without one the error stays.
func (p *Plugin) publishedFrom(dir string, torn error) (record, error) {
	published, _, _ := p.podRecords()
	for _, r := range published {
		if dir == p.stagedDir(r.Driver, r.Handle) {
			return r, nil
		}
	}
	return record{}, torn
}

// spec is as much of a PersistentVolume as a record has.
func (r record) spec(block bool) *plugins.Spec {
	mode := corev1.PersistentVolumeFilesystem
	if block {
		mode = corev1.PersistentVolumeBlock
	}
	name := r.Name
	if name == "" {
		name = hash(r.Handle)
	}
	return &plugins.Spec{PersistentVolume: &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			VolumeMode:             &mode,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: r.Driver, VolumeHandle: r.Handle}},
		},
	}}
}

// lost is the spec of a volume of which only the path of its record is known: that is its
// name, which no PersistentVolume can have.
func lost(path string) *plugins.Spec {
	return &plugins.Spec{PersistentVolume: &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: path},
		Spec:       corev1.PersistentVolumeSpec{PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{}}},
	}}
}

func lostDir(spec *plugins.Spec) (path string, ok bool) {
	pv := spec.PersistentVolume
	return spec.Name(), pv != nil && pv.Spec.CSI != nil && pv.Spec.CSI.VolumeHandle == "" && filepath.IsAbs(pv.Name)
}
