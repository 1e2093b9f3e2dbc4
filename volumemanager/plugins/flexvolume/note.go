package flexvolume

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// note forgets what was noted of a volume that is about to be mounted, and notes what a
// pod's own volume is mounted as: an empty directory in Paths.PodPlugin, called by its
// VolumeName. Those that a killed call leaves go with the pod.
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

// groupNote begins the names of notes that all of a volume has a group. No name of a volume
// has "=".
func groupNote(name string) string { return name + ".fsGroup=" }

// notedGroup tells whether all of the volume has a group. What is noted of another one is
// forgotten: it will not be true any more.
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

// checkSame refuses a pod's own volume that is mounted, and was changed since: no driver
// is told of that.
func (m *mounter) checkSame() error {
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

// noted are the VolumeNames that are written down of a pod's volume: the last one, or none.
func (d *driver) noted(pod types.UID, name string) (names []string, err error) {
	names, err = d.notesOf(pod, name+"-")
	return slices.DeleteFunc(names, func(n string) bool { return len(n) != len(name)+1+sumLength }), err
}

// notesOf are a pod's notes whose names begin with a prefix.
func (d *driver) notesOf(pod types.UID, prefix string) (names []string, err error) {
	entries, err := os.ReadDir(d.notes(pod))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// unnote forgets all that is noted of a pod's volume.
func (d *driver) unnote(pod types.UID, name string) error {
	names, err := d.noted(pod, name)
	groups, failed := d.notesOf(pod, groupNote(name))
	err = errors.Join(err, failed)
	for _, n := range append(names, groups...) {
		err = errors.Join(err, mount.RemoveTarget(filepath.Join(d.notes(pod), n)))
	}
	return err
}
