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

// note removes the notes of a volume before it is mounted. For an inline volume it then writes a
// note of the VolumeName: an empty directory in Paths.PodPlugin with that name. Notes of
// interrupted calls are removed with the pod.
func (m *mounter) note() error {
	if err := m.unnote(m.pod.UID, m.spec.Name()); err != nil || m.spec.PersistentVolume != nil {
		return err
	}
	name, err := m.VolumeName(m.spec)
	if err != nil {
		return err
	}
	return os.MkdirAll(filepath.Join(m.notes(m.pod.UID), name), 0o750)
}

// groupNote returns the prefix of a note that a group was applied to the whole volume. No name of a
// volume contains "=".
func groupNote(name string) string { return name + ".fsGroup=" }

// notedGroup reports whether a group was applied to the whole volume. It removes notes of other
// groups, which the caller makes obsolete.
func (m *mounter) notedGroup(group int64) (bool, error) {
	noted, err := m.notesOf(m.pod.UID, groupNote(m.spec.Name()))
	if err != nil {
		return false, err
	}
	wanted := m.groupNoteName(group)
	for _, n := range noted {
		if n != wanted {
			err = errors.Join(err, mount.RemoveTarget(filepath.Join(m.notes(m.pod.UID), n)))
		}
	}
	return slices.Contains(noted, wanted), err
}

func (m *mounter) noteGroup(group int64) error {
	return os.MkdirAll(filepath.Join(m.notes(m.pod.UID), m.groupNoteName(group)), 0o750)
}

func (m *mounter) groupNoteName(group int64) string {
	return groupNote(m.spec.Name()) + strconv.FormatInt(group, 10)
}

// checkUnchanged refuses an inline volume whose manifest changed while it is mounted: drivers are
// not notified of changes.
func (m *mounter) checkUnchanged() error {
	if m.spec.PersistentVolume != nil {
		return nil
	}
	name, err := m.VolumeName(m.spec)
	if err != nil {
		return err
	}
	noted, err := m.noted(m.pod.UID, m.spec.Name())
	if err == nil && len(noted) > 0 && !slices.Contains(noted, name) {
		return plugins.Invalidf("volume %s: flexVolume: it was changed, but the pod has the earlier volume: undo the change, or give the new volume another name", m.spec.Name())
	}
	return err
}

func (d *driver) notes(pod types.UID) string { return d.host.Paths().PodPlugin(pod, d.name) }

// noted returns the VolumeNames in the notes of a pod's volume: one or none.
func (d *driver) noted(pod types.UID, name string) (names []string, err error) {
	names, err = d.notesOf(pod, name+"-")
	return slices.DeleteFunc(names, func(n string) bool { return len(n) != len(name)+1+sumLength }), err
}

// notesOf returns a pod's notes whose names have a prefix.
func (d *driver) notesOf(pod types.UID, prefix string) (names []string, err error) {
	entries, err := plugins.Entries(d.notes(pod))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// unnote removes all notes of a pod's volume.
func (d *driver) unnote(pod types.UID, name string) error {
	names, err := d.noted(pod, name)
	groups, failed := d.notesOf(pod, groupNote(name))
	err = errors.Join(err, failed)
	for _, n := range append(names, groups...) {
		err = errors.Join(err, mount.RemoveTarget(filepath.Join(d.notes(pod), n)))
	}
	return err
}
