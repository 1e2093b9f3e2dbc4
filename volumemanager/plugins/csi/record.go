package csi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// record is the content of vol_data.json, with the kubelet's keys and two more. All values are
// strings, as the kubelet requires. A record is written before the call that it describes, and removed
// after the call that undoes it.
type record struct {
	Name       string                        `json:"specVolID,omitempty"`
	Handle     string                        `json:"volumeHandle"`
	Driver     string                        `json:"driverName"`
	Node       string                        `json:"nodeName,omitempty"`
	Attachment string                        `json:"attachmentID,omitempty"`
	Lifecycle  storagev1.VolumeLifecycleMode `json:"volumeLifecycleMode,omitempty"`
	// Source is a hash of an inline volume's fields in the pod's manifest.
	Source string `json:"trivet.dev/source,omitempty"`
	// FSGroup is the group that was applied to the whole volume.
	FSGroup string `json:"trivet.dev/fsGroup,omitempty"`
}

// readRecord reads the record in a directory. It returns fs.ErrNotExist if there is none.
func readRecord(dir string) (record, error) {
	var r record
	file := filepath.Join(dir, recordFile)
	if err := plugins.ReadJSON(file, &r); err != nil {
		return record{}, err
	}
	if !validDriver(r.Driver) || r.Handle == "" {
		return record{}, fmt.Errorf("%s: driverName or volumeHandle is missing", file)
	}
	return r, nil
}

// writeRecord writes a record. fresh is true if there was no record before, not even a torn one.
func (p *Plugin) writeRecord(dir string, r record) (fresh bool, err error) {
	p.recording.RLock()
	defer p.recording.RUnlock()
	_, err = os.Lstat(filepath.Join(dir, recordFile))
	fresh = errors.Is(err, fs.ErrNotExist)
	if err = makeDirs(dir); err == nil {
		err = atomicfile.WriteJSON(dir, recordFile, r)
	}
	if err == nil {
		p.records.Store(dir, r)
	} else if fresh {
		_ = p.removeRecord(dir)
	}
	return fresh, err
}

// removeRecord removes a record, its temporary file if a write was interrupted, and its
// directory.
func (p *Plugin) removeRecord(dir string) error {
	p.records.Delete(dir)
	return errors.Join(removeFile(dir, recordFile), mount.RemoveTarget(dir))
}

// removeFile removes a file, and the temporary file of an interrupted write.
func removeFile(dir, name string) error {
	file := filepath.Join(dir, name)
	return errors.Join(mount.RemoveTarget(file+atomicfile.Temporary), mount.RemoveTarget(file))
}

// makeDirs creates a directory and its parents durably. It does not access an existing directory,
// because it may be a mount of an unreachable server.
func makeDirs(dir string) error {
	err := os.Mkdir(dir, 0o750)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeDirs(filepath.Dir(dir)); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o750)
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	parent, err := os.OpenRoot(filepath.Dir(dir))
	if err != nil {
		return err
	}
	defer parent.Close()
	return atomicfile.Sync(parent, ".")
}

// findRecord reads the record in a directory. If that fails, it returns a record of a staged or attached
// volume that matches. If none matches, it returns the error of the read.
func (p *Plugin) findRecord(dir string, matches func(record) bool) (record, error) {
	r, err := readRecord(dir)
	if err == nil {
		return r, nil
	}
	staged, _ := p.recordDirs()
	for _, dir := range staged {
		if r, err := readRecord(dir); err == nil && matches(r) {
			return r, nil
		}
	}
	attachments, _ := p.attachments()
	for _, a := range attachments {
		if r, ok := attachedRecord(a); ok && matches(r) {
			return r, nil
		}
	}
	return record{}, err
}

// recordDirs returns the directories for records of staged volumes, including those without a record.
func (p *Plugin) recordDirs() ([]string, error) {
	drivers, err := subdirectories(p.ownDir())
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, driver := range drivers {
		driverDir := filepath.Join(p.ownDir(), driver)
		volumes, err := subdirectories(driverDir)
		if err != nil {
			return nil, err
		}
		for _, v := range volumes {
			switch {
			case driver != devicesDir && stagedName.MatchString(v):
				dirs = append(dirs, filepath.Join(driverDir, v))
			case driver == devicesDir && v != stagingDir && v != publishDir:
				dirs = append(dirs, filepath.Join(driverDir, v, dataDir))
			}
		}
	}
	return dirs, nil
}

// stagedName matches the directory of a staged filesystem: a hash.
var stagedName = regexp.MustCompile("^[0-9a-f]{64}$")

// subdirectories returns the names of the subdirectories of a directory; none if the directory does not
// exist.
func subdirectories(dir string) ([]string, error) {
	entries, err := plugins.Entries(dir)
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}
