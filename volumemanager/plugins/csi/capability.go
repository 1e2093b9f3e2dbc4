package csi

import (
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
)

// capability returns the capability in all calls for a volume (csi-spec, VolumeCapability).
// singleWriters is true if the called service has the capability SINGLE_NODE_MULTI_WRITER. group is
// the fsGroup that the driver applies; it may be nil.
func (v *volume) capability(singleWriters bool, group *int64) *csi.VolumeCapability {
	mode := corev1.ReadWriteOnce
	if len(v.accessModes) > 0 {
		mode = v.accessModes[0] // like the kubelet, whose choice drivers expect
	}
	return capability(mode, singleWriters, v.block, &csi.VolumeCapability_MountVolume{
		FsType:           v.fsType,
		MountFlags:       v.mountOptions,
		VolumeMountGroup: groupName(group),
	})
}

// groupName returns a group in the format of volume_mount_group; "" for nil.
func groupName(group *int64) string {
	if group == nil {
		return ""
	}
	return strconv.FormatInt(*group, 10)
}

// capability returns the capability of a raw device if block is set, otherwise that of the filesystem m.
// singleWriters is as in volume.capability.
func capability(mode corev1.PersistentVolumeAccessMode, singleWriters, block bool, m *csi.VolumeCapability_MountVolume) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: accessMode(mode, singleWriters)}}
	c.AccessType = &csi.VolumeCapability_Mount{Mount: m}
	if block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	}
	return c
}

// accessMode translates as the kubelet and external-provisioner do. Only services with
// SINGLE_NODE_MULTI_WRITER get the modes that distinguish one writer from several.
func accessMode(mode corev1.PersistentVolumeAccessMode, singleWriters bool) csi.VolumeCapability_AccessMode_Mode {
	switch mode {
	case corev1.ReadWriteMany:
		return csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	case corev1.ReadOnlyMany:
		return csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	case corev1.ReadWriteOncePod:
		if singleWriters {
			return csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		}
	default:
		if singleWriters {
			return csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		}
	}
	return csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
}
