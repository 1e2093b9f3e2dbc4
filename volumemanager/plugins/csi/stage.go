package csi

import (
	"cmp"
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

// NeedsDeviceMount reports whether the driver stages volumes. A raw device always needs a
// device mount, because all pods share its record.
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

// VolumeName joins driver and handle as the kubelet does.
func (p *Plugin) VolumeName(spec *plugins.Spec) (string, error) {
	if dir, ok := tornRecord(spec); ok {
		return dir, nil
	}
	v, err := persistentVolume(spec)
	if err != nil {
		return "", err
	}
	return volumeName(v.driver, v.handle), nil
}

func volumeName(driver, handle string) string { return driver + "^" + handle }

// DeviceMountPath returns the staging path.
func (p *Plugin) DeviceMountPath(spec *plugins.Spec) (string, error) {
	v, err := newVolume(spec, nil)
	if err != nil {
		return "", err
	}
	staging, _ := p.stagingPaths(v)
	return staging, nil
}

// MountDevice calls NodeStageVolume. It does not check the mount table, because a driver may stage
// without a mount (csi-spec).
func (p *Plugin) MountDevice(ctx context.Context, spec *plugins.Spec, attachment plugins.Attachment, args plugins.MounterArgs) error {
	v, d, err := p.volumeAndDriver(spec)
	if err != nil {
		return err
	}
	request, err := p.stageRequest(d, v, attachment, args)
	if err != nil {
		return err
	}
	staging, data := p.stagingPaths(v)
	fresh, err := p.writeRecord(data, record{Name: v.name, Handle: v.handle, Driver: v.driver})
	if err != nil || !d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
		return err
	}
	if err = makeDirs(staging); err == nil {
		_, err = call(ctx, d, d.node.NodeStageVolume, request)
	}
	if err != nil {
		return p.undoOrUncertain(err, fresh, staging, func() error { return p.removeStaged(staging, data) })
	}
	return nil
}

// stageRequest returns the request of NodeStageVolume.
func (p *Plugin) stageRequest(d *driver, v *volume, attachment plugins.Attachment, args plugins.MounterArgs) (*csi.NodeStageVolumeRequest, error) {
	secrets, err := p.secret(v.persistent.NodeStageSecretRef)
	if err != nil {
		return nil, err
	}
	staging, _ := p.stagingPaths(v)
	return &csi.NodeStageVolumeRequest{
		VolumeId:          v.handle,
		PublishContext:    attachment,
		StagingTargetPath: staging,
		VolumeCapability:  v.capability(d.nodeCan(csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), d.groupFor(args)),
		Secrets:           secrets,
		VolumeContext:     v.attributes,
	}, nil
}

// groupFor returns the fsGroup for a driver that applies the group itself; nil for others.
func (d *driver) groupFor(args plugins.MounterArgs) *int64 {
	if d.nodeCan(csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP) {
		return args.FSGroup
	}
	return nil
}

// UnmountDevice calls NodeUnstageVolume if the driver stages volumes, or if the staging path is
// mounted. If the record is torn, and no other record identifies the volume, it only removes the
// directories, provided that they are not mounted.
func (p *Plugin) UnmountDevice(ctx context.Context, spec *plugins.Spec) error {
	if dir, ok := tornRecord(spec); ok {
		return p.unmountTorn(dir)
	}
	v, err := newVolume(spec, nil)
	if err != nil {
		return err
	}
	staging, data := p.stagingPaths(v)
	if _, err := os.Lstat(data); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	d, err := p.driver(v.driver)
	if err != nil {
		return err
	}
	isMounted, err := p.mounted(staging)
	if err != nil {
		return err
	}
	if isMounted || d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
		request := &csi.NodeUnstageVolumeRequest{VolumeId: v.handle, StagingTargetPath: staging}
		if _, err := call(ctx, d, d.node.NodeUnstageVolume, request); err != nil {
			return err
		}
	}
	if err := p.checkUnmounted(v.driver, staging); err != nil {
		return err
	}
	return p.removeStaged(staging, data)
}

// removeStaged removes the directories and the record of a staged volume.
func (p *Plugin) removeStaged(staging, data string) error {
	if err := removeLeftover(staging); err != nil {
		return err
	}
	if err := p.removeRecord(data); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(data)) // fails while it contains other volumes
	return nil
}

// unmountTorn removes the directory of a torn record if nothing is mounted. It keeps the directory if
// a concurrent call has written a valid record meanwhile.
func (p *Plugin) unmountTorn(dir string) error {
	p.recording.Lock()
	defer p.recording.Unlock()
	if _, err := readRecord(dir); err == nil {
		return nil
	}
	staging := p.stagedAt(dir)
	isMounted, err := p.mounted(staging)
	if err != nil {
		return err
	}
	if isMounted {
		return fmt.Errorf("%s is missing or torn: the volume mounted at %s is unknown, so its driver cannot unmount it: unmount it and remove %s by hand", filepath.Join(dir, recordFile), staging, dir)
	}
	return p.removeStaged(staging, dir)
}

// stagedAt returns the staging path of the volume whose record is in a directory.
func (p *Plugin) stagedAt(dir string) string {
	if filepath.Base(dir) == dataDir {
		return p.stagedDevice(filepath.Base(filepath.Dir(dir)))
	}
	return filepath.Join(dir, globalMount)
}

// DeviceMounts returns the volumes that have a directory for their record, even if it has no record.
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

// deviceMount returns the volume whose record belongs in a directory. If no record identifies the volume,
// its VolumeName is the directory.
func (p *Plugin) deviceMount(dir string) plugins.DeviceMount {
	block := filepath.Base(dir) == dataDir
	r, err := p.findRecord(dir, func(r record) bool {
		if block {
			return dir == p.deviceData(r.Name)
		}
		return dir == p.stagedDir(r.Driver, r.Handle)
	})
	if err != nil && !block {
		r, err = p.publishedRecord(dir, err)
	}
	if err != nil {
		return plugins.DeviceMount{VolumeName: dir, Spec: tornSpec(dir), Block: block}
	}
	if block { // a kubelet's record may lack the name
		r.Name = filepath.Base(filepath.Dir(dir))
	}
	return plugins.DeviceMount{VolumeName: volumeName(r.Driver, r.Handle), Spec: r.spec(block), Block: block}
}

// publishedRecord searches the records of published volumes for the one that is staged in a directory
// without a valid record. It compares paths, because driver and handle determine the path of the
// directory. If no record matches, it returns the error torn.
func (p *Plugin) publishedRecord(dir string, torn error) (record, error) {
	published, _, _ := p.podRecords()
	for _, r := range published {
		if dir == p.stagedDir(r.Driver, r.Handle) {
			return r, nil
		}
	}
	return record{}, torn
}

// spec returns a PersistentVolume with the fields that a record contains.
func (r record) spec(block bool) *plugins.Spec {
	mode := corev1.PersistentVolumeFilesystem
	if block {
		mode = corev1.PersistentVolumeBlock
	}
	return &plugins.Spec{PersistentVolume: &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: cmp.Or(r.Name, hash(r.Handle))},
		Spec: corev1.PersistentVolumeSpec{
			VolumeMode:             &mode,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: r.Driver, VolumeHandle: r.Handle}},
		},
	}}
}

// tornSpec returns the spec of a volume whose record is torn. The spec's name is the path of the
// record, which is not a valid name of a PersistentVolume.
func tornSpec(path string) *plugins.Spec { return record{Name: path}.spec(false) }

// tornRecord returns the path of the record if spec is the result of tornSpec.
func tornRecord(spec *plugins.Spec) (path string, ok bool) {
	pv := spec.PersistentVolume
	return spec.Name(), pv != nil && pv.Spec.CSI != nil && pv.Spec.CSI.VolumeHandle == "" && filepath.IsAbs(pv.Name)
}
