package csi

import (
	"crypto/sha256"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// volume holds the fields of a spec that calls to a driver need.
type volume struct {
	// name is the name of the PersistentVolume, or of the volume in the pod.
	name           string
	driver, handle string
	fsType         string
	attributes     map[string]string
	mountOptions   []string
	accessModes    []corev1.PersistentVolumeAccessMode
	readOnly       bool
	block          bool
	ephemeral      bool
	// publishSecret is for NodePublishVolume. persistent has the references for other calls; it
	// is nil for an inline volume.
	publishSecret *corev1.SecretReference
	persistent    *corev1.CSIPersistentVolumeSource
}

// newVolume validates a spec, and returns its volume. For a PersistentVolume, pod may be nil.
func newVolume(spec *plugins.Spec, pod *corev1.Pod) (*volume, error) {
	var v *volume
	var err error
	if spec.PersistentVolume != nil {
		v, err = persistentVolume(spec)
	} else {
		v, err = inlineVolume(spec, pod)
	}
	if err == nil && pod != nil {
		err = plugins.CheckPart("pod UID", string(pod.UID))
	}
	if err == nil {
		err = plugins.CheckPart("volume name", v.name)
	}
	if err == nil && v.block && (v.name == stagingDir || v.name == publishDir) {
		err = plugins.Invalidf("PersistentVolume %s: the name is reserved for a directory of raw devices: rename the PersistentVolume", v.name)
	}
	return v, err
}

// volumeAndDriver returns the volume of a PersistentVolume and its driver.
func (p *Plugin) volumeAndDriver(spec *plugins.Spec) (*volume, *driver, error) {
	v, err := newVolume(spec, nil)
	if err != nil {
		return nil, nil, err
	}
	d, err := p.driver(v.driver)
	return v, d, err
}

// persistentVolume returns the volume of a PersistentVolume.
func persistentVolume(spec *plugins.Spec) (*volume, error) {
	pv := spec.PersistentVolume
	source := pv.Spec.CSI
	if source == nil || !validDriver(source.Driver) || source.VolumeHandle == "" {
		return nil, plugins.Invalidf("PersistentVolume %s: spec.csi needs driver, a domain name, and volumeHandle", pv.Name)
	}
	return &volume{
		name:          pv.Name,
		driver:        source.Driver,
		handle:        source.VolumeHandle,
		fsType:        source.FSType,
		attributes:    source.VolumeAttributes,
		mountOptions:  pv.Spec.MountOptions,
		accessModes:   pv.Spec.AccessModes,
		readOnly:      spec.ReadOnly || source.ReadOnly,
		block:         spec.Block(),
		publishSecret: source.NodePublishSecretRef,
		persistent:    source,
	}, nil
}

// inlineVolume returns the volume of a csi source in a pod.
func inlineVolume(spec *plugins.Spec, pod *corev1.Pod) (*volume, error) {
	if spec.Volume == nil || spec.Volume.CSI == nil || pod == nil {
		return nil, plugins.Invalidf("volume: want a csi source, of a PersistentVolume or of a pod")
	}
	name, source := spec.Volume.Name, spec.Volume.CSI
	if !validDriver(source.Driver) {
		return nil, plugins.Invalidf("volume %s: csi.driver %q: want a domain name", name, source.Driver)
	}
	v := &volume{
		name:        name,
		driver:      source.Driver,
		handle:      "csi-" + hash(string(pod.UID)+name), // as in a kubelet: drivers recognize inline volumes by this form
		attributes:  source.VolumeAttributes,
		accessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		readOnly:    spec.ReadOnly || source.ReadOnly != nil && *source.ReadOnly,
		ephemeral:   true,
	}
	if source.FSType != nil {
		v.fsType = *source.FSType
	}
	if ref := source.NodePublishSecretRef; ref != nil {
		v.publishSecret = &corev1.SecretReference{Namespace: pod.Namespace, Name: ref.Name}
	}
	return v, nil
}

// hash returns the SHA-256 hash of a string in hexadecimal digits.
func hash(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) }

// singleNodeWriter reports whether only one node at a time writes the volume.
func (v *volume) singleNodeWriter() bool {
	return slices.Contains(v.accessModes, corev1.ReadWriteOnce) || slices.Contains(v.accessModes, corev1.ReadWriteOncePod)
}
