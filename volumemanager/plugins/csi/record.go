package csi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/internal/atomicfile"
)

// record is vol_data.json, with the keys that the kubelet writes, and two more. All are
// strings, as the kubelet reads it. It is there before the call that it tells of, and until
// the one that undoes it.
type record struct {
	Name       string                        `json:"specVolID,omitempty"`
	Handle     string                        `json:"volumeHandle"`
	Driver     string                        `json:"driverName"`
	Node       string                        `json:"nodeName,omitempty"`
	Attachment string                        `json:"attachmentID,omitempty"`
	Lifecycle  storagev1.VolumeLifecycleMode `json:"volumeLifecycleMode,omitempty"`
	// Source is a hash of what the pod's manifest says of an inline volume.
	Source string `json:"trivet.dev/source,omitempty"`
	// FSGroup is the group to which all of a pod's volume has been given.
	FSGroup string `json:"trivet.dev/fsGroup,omitempty"`
}

// readRecord gives fs.ErrNotExist if there is none.
func readRecord(dir string) (record, error) {
	var r record
	file := filepath.Join(dir, recordFile)
	b, err := os.ReadFile(file)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}, fmt.Errorf("%s: %w", file, err)
	}
	if !validDriver(r.Driver) || r.Handle == "" {
		return record{}, fmt.Errorf("%s: driverName or volumeHandle is missing", file)
	}
	return r, nil
}

// remember writes a record. fresh: there was none before, not even a torn one.
func (p *Plugin) remember(dir string, r record) (fresh bool, err error) {
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
		_ = p.forget(dir)
	}
	return fresh, err
}

// forget removes a record, with what a killed writer left, and its directory.
func (p *Plugin) forget(dir string) error {
	p.records.Delete(dir)
	return errors.Join(removeFile(dir, recordFile), removeThere(dir))
}

func removeFile(dir, name string) error {
	file := filepath.Join(dir, name)
	return errors.Join(removeThere(file), removeThere(file+".tmp"))
}

// removeThere removes a file or an empty directory, with unlink(2) or rmdir(2). It is no
// error if there is none.
func removeThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// makeDirs makes a directory and those above it, each durable. One that is there is not
// looked into: it may be a mount of a server that is gone.
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

// known is what records of staged and attached volumes tell: by it a volume is found
// whose own record is torn.
func (p *Plugin) known() []record {
	var all []record
	dirs, _ := p.recordDirs()
	for _, dir := range dirs {
		if r, err := readRecord(dir); err == nil {
			all = append(all, r)
		}
	}
	attachments, _ := p.attachments()
	for _, a := range attachments {
		if r, ok := attachedRecord(a); ok {
			all = append(all, r)
		}
	}
	return all
}

// find reads the record in a directory, or else finds another that matches. The error is of
// the one that should be there.
func (p *Plugin) find(dir string, matches func(record) bool) (record, error) {
	r, err := readRecord(dir)
	if err == nil {
		return r, nil
	}
	for _, r := range p.known() {
		if matches(r) {
			return r, nil
		}
	}
	return record{}, err
}

// recordDirs are those with records of staged volumes, or what is left of them.
func (p *Plugin) recordDirs() ([]string, error) {
	drivers, err := names(p.ownDir())
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, driver := range drivers {
		of := filepath.Join(p.ownDir(), driver)
		volumes, err := names(of)
		if err != nil {
			return nil, err
		}
		for _, v := range volumes {
			switch {
			case driver != devicesDir && stagedName.MatchString(v):
				dirs = append(dirs, filepath.Join(of, v))
			case driver == devicesDir && v != stagingDir && v != publishDir:
				dirs = append(dirs, filepath.Join(of, v, dataDir))
			}
		}
	}
	return dirs, nil
}

// stagedName is that of a directory of a staged filesystem: a hash.
var stagedName = regexp.MustCompile("^[0-9a-f]{64}$")

// names are those of the directories in a directory; none if it is not there.
func names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}
