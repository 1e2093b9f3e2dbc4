package reconciler

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/state"
	"github.com/trivet-csi/trivet/volumemanager/subpath"
)

// directory returns the state of a pod's directory.
func (r *Reconciler) directory(pod types.UID) *state.PodDirectory {
	d := r.actual.Pods[pod]
	if d == nil {
		d = &state.PodDirectory{}
		r.actual.Pods[pod] = d
	}
	return d
}

// removeDirectories removes the directories of pods that are not desired and have no volumes.
func (r *Reconciler) removeDirectories() {
	if !r.desired.Complete {
		return
	}
	unused := map[types.UID]*state.PodDirectory{}
	for uid, d := range r.actual.Pods {
		if r.desired.Pods[uid] == nil && !d.Busy {
			unused[uid] = d
		}
	}
	if len(unused) == 0 {
		return
	}
	for id := range r.actual.Mounts {
		delete(unused, id.Pod)
	}
	for pod, d := range unused {
		r.start(task{
			key: "pod " + string(pod), busy: &d.Busy, progress: &d.Progress, running: state.Unmounting, failed: state.Failed,
			object: "pod " + string(pod), reason: "FailedRemoveDirectory",
			Operation: operation.Operation{Name: "pod_clean", Routine: true, Do: func(context.Context) error {
				if err := r.removeDirectory(pod); err != nil {
					return err
				}
				r.mu.Lock()
				defer r.mu.Unlock()
				delete(r.actual.Pods, pod)
				return nil
			}},
		})
	}
}

func (r *Reconciler) removeDirectory(pod types.UID) error {
	dir := r.paths.Pod(pod)
	// SubPaths of volumes without a directory in the pod's directory (hostPath).
	subPaths, err := below(filepath.Join(dir, "volume-subpaths"), 3)
	if err != nil {
		return err
	}
	for _, p := range subPaths {
		if err := subpath.Unbind(p.path); err != nil {
			return err
		}
	}
	for _, part := range []struct {
		name  string
		depth int
	}{{"volumes", 1}, {"volumeDevices", 1}, {"volume-subpaths", 2}, {"plugins", 2}, {"", 0}} {
		if err := removeEmpty(filepath.Join(dir, part.name), part.depth); err != nil {
			return err
		}
	}
	return nil
}

// entry is a directory entry. It is not accessed for its type: it may be a mount of a server that
// does not answer.
type entry struct {
	path string
	fs.DirEntry
}

// below returns the entries at a depth below dir. It follows no links.
func below(dir string, depth int) (found []entry, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case depth == 1:
			found = append(found, entry{path, e})
		case e.IsDir():
			deeper, err := below(path, depth-1)
			if err != nil {
				return nil, err
			}
			found = append(found, deeper...)
		}
	}
	return found, err
}

// removeEmpty removes a directory and the directories in it, down to a depth, if they are empty. It
// removes no files and no mounts.
func removeEmpty(dir string, depth int) error {
	for ; depth > 0; depth-- {
		found, err := below(dir, depth)
		if err != nil {
			return err
		}
		for _, p := range found {
			if err := removeDir(p.path); err != nil {
				return err
			}
		}
	}
	return removeDir(dir)
}

// removeDir removes an empty directory, with rmdir(2). A missing one is no error.
func removeDir(dir string) error {
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && info.IsDir() {
		err = os.Remove(dir)
	} else if err == nil {
		err = errors.New("it is not a directory")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remains of a removed pod: %s: %w: check what it is, and remove it by hand", dir, err)
	}
	return nil
}
