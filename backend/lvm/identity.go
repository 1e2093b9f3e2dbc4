package lvm

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/volume"
)

// copyFile is the name of the file with a snapshotCopy in the folder of a snapshot.
const copyFile = "lvm.json"

// snapshotCopy identifies the logical volume of a snapshot. It is durable before the logical volume is created.
type snapshotCopy struct {
	Version int `json:"version"`
	identity
	// Encrypted means that the logical volume has a complete container.
	Encrypted bool `json:"encrypted,omitempty"`
}

// copyVersion is the version of snapshotCopies that this driver writes and reads.
const copyVersion = 1

// identity identifies a logical volume.
type identity struct {
	// GUID is in a tag of the logical volume, and in its name unless it was taken over.
	GUID string `json:"guid"`
	// Group and Volume are the UUIDs of the volume group and of the logical volume. Volume is empty until the logical
	// volume is created.
	Group  string `json:"groupUUID"`
	Volume string `json:"volumeUUID,omitempty"`
}

// id identifies the logical volume.
func (i identity) id() dm.VolumeID { return dm.VolumeID{Group: i.Group, Volume: i.Volume} }

// check refuses values that no driver wrote.
func (i identity) check() error {
	switch {
	case !guidPattern.MatchString(i.GUID):
		return volume.Errorf(volume.ErrDamaged, "section.guid is %q: expected a GUID in lower case; restore the record from a backup", i.GUID)
	case !lvmPattern.MatchString(i.Group):
		return volume.Errorf(volume.ErrDamaged, "section.groupUUID is %q: expected the UUID of a volume group; restore the record from a backup", i.Group)
	case i.Volume != "" && !lvmPattern.MatchString(i.Volume):
		return volume.Errorf(volume.ErrDamaged, "section.volumeUUID is %q: expected the UUID of a logical volume; restore the record from a backup", i.Volume)
	}
	return nil
}

// write durably writes the file in the folder of a snapshot.
func (c snapshotCopy) write(folder *os.Root) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return atomicfile.Write(folder, copyFile, b)
}

// readCopy reads the file in the folder of a snapshot. ok is false if there is none.
func readCopy(folder fs.FS, dir string) (c snapshotCopy, ok bool, err error) {
	b, err := fs.ReadFile(folder, filepath.Join(dir, copyFile))
	if errors.Is(err, fs.ErrNotExist) {
		return c, false, nil
	}
	if err == nil {
		c, err = parseCopy(b)
	}
	return c, err == nil, err
}

func parseCopy(b []byte) (c snapshotCopy, err error) {
	if err := volume.DecodeRecord(b, &c, &c.Version, copyVersion); err != nil {
		return c, volume.Errorf(volume.ErrDamaged, "%s: %w", copyFile, err)
	}
	return c, c.check()
}

// snapshotsIn returns the UUIDs of the logical volumes of the snapshots in the directory of a pool by their GUIDs: of
// existing, deleted and incomplete ones. The UUID of an incomplete one is empty.
func snapshotsIn(directory string) (uuids map[string]string, unreadable error) {
	uuids = map[string]string{}
	for _, pattern := range []string{".trivet/tmp/*/*", "snapshots/*/*", ".trivet/trash/*/*"} { // in the order in which sets move
		files, err := filepath.Glob(filepath.Join(directory, pattern, copyFile))
		unreadable = errors.Join(unreadable, err)
		for _, file := range files {
			c, ok, err := readCopy(os.DirFS(filepath.Dir(file)), ".")
			if ok {
				uuids[c.GUID] = c.Volume
			}
			unreadable = errors.Join(unreadable, err)
		}
	}
	return uuids, unreadable
}
