package flexvolume

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// A marker is an empty directory in Paths.PodPlugin. Its name records a fact about a pod's volume:
//
//	<VolumeName>               the inline volume that may be mounted
//	<volume>.fsGroup=<group>   the group that was applied to the whole volume
//
// No name of a volume contains "=". Markers that interrupted calls leave are removed with the pod.

// writeVolumeMarker replaces the markers of a volume before it is mounted. Only an inline volume gets a
// new one.
func (m *mounter) writeVolumeMarker() error {
	if err := m.removeMarkers(m.pod.UID, m.spec.Name()); err != nil || m.spec.PersistentVolume != nil {
		return err
	}
	name, err := m.VolumeName(m.spec)
	if err != nil {
		return err
	}
	return os.MkdirAll(m.marker(m.pod.UID, name), 0o750)
}

func groupPrefix(name string) string { return name + ".fsGroup=" }

func (m *mounter) groupMarker(group int64) string {
	return m.marker(m.pod.UID, groupPrefix(m.spec.Name())+strconv.FormatInt(group, 10))
}

// keepGroupMarker removes the markers of other groups, because the caller applies this group. applied is
// true if the marker of this group exists.
func (m *mounter) keepGroupMarker(group int64) (applied bool, err error) {
	names, err := m.markers(m.pod.UID, groupPrefix(m.spec.Name()))
	if err != nil {
		return false, err
	}
	for _, name := range names {
		marker := m.marker(m.pod.UID, name)
		if marker == m.groupMarker(group) {
			applied = true
		} else {
			err = errors.Join(err, mount.RemoveTarget(marker))
		}
	}
	return applied, err
}

// checkUnchanged refuses an inline volume whose manifest was changed while the volume is mounted,
// because drivers are not notified of changes.
func (m *mounter) checkUnchanged() error {
	if m.spec.PersistentVolume != nil {
		return nil
	}
	name, err := m.VolumeName(m.spec)
	if err != nil {
		return err
	}
	mounted, err := m.volumeMarkers(m.pod.UID, m.spec.Name())
	if err == nil && len(mounted) > 0 && !slices.Contains(mounted, name) {
		return plugins.Invalidf("volume %s: the flexVolume source was changed, but the pod has the earlier volume: undo the change, or give the new volume another name", m.spec.Name())
	}
	return err
}

// marker returns the path of a marker.
func (d *driver) marker(pod types.UID, name string) string {
	return filepath.Join(d.host.Paths().PodPlugin(pod, d.name), name)
}

// markers returns the names of a pod's markers that have a prefix.
func (d *driver) markers(pod types.UID, prefix string) (names []string, err error) {
	entries, err := plugins.Entries(d.host.Paths().PodPlugin(pod, d.name))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// volumeMarkers returns the VolumeNames in the markers of a pod's volume: one or none.
func (d *driver) volumeMarkers(pod types.UID, name string) (names []string, err error) {
	names, err = d.markers(pod, name+"-")
	return slices.DeleteFunc(names, func(n string) bool { return len(n) != len(name)+1+sumLength }), err
}

// removeMarkers removes all markers of a pod's volume.
func (d *driver) removeMarkers(pod types.UID, name string) error {
	volumes, volumesErr := d.volumeMarkers(pod, name)
	groups, err := d.markers(pod, groupPrefix(name))
	err = errors.Join(volumesErr, err)
	for _, marker := range append(volumes, groups...) {
		err = errors.Join(err, mount.RemoveTarget(d.marker(pod, marker)))
	}
	return err
}
