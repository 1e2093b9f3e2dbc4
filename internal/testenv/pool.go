package testenv

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// PoolEntries returns the paths of all volumes and snapshots in a pool's directory, including temporary
// and deleted ones.
func PoolEntries(dir string) (paths []string, err error) {
	for _, name := range []string{"volumes", "snapshots", ".trivet/tmp", ".trivet/trash"} {
		entries, err := os.ReadDir(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			paths = append(paths, filepath.Join(dir, name, e.Name()))
		}
	}
	return paths, nil
}

// PoolUUID reads a pool's UUID from the marker in the pool's directory.
func PoolUUID(dir string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "pool.json"))
	if err != nil {
		return "", err
	}
	var marker struct{ UUID string }
	return marker.UUID, json.Unmarshal(b, &marker)
}

// Fsck checks the filesystem on an image with the filesystem's own tool, without repairs. It does nothing
// if fsType is empty.
func Fsck(fsType, image string) error {
	if fsType == "" {
		return nil
	}
	words := map[string][]string{
		"ext4":  {"e2fsck", "-fn", image},
		"xfs":   {"xfs_repair", "-n", "-f", image},
		"btrfs": {"btrfs", "check", "--readonly", image},
	}[fsType]
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%q: %w\n%s", words, err, out)
	}
	return nil
}
