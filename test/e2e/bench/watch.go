package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// moment is an event in the life of a pod and its volume.
type moment string

const (
	created    moment = "claim and pod created"
	selected   moment = "node selected"
	provided   moment = "PersistentVolume created"
	bound      moment = "claim bound"
	scheduled  moment = "pod scheduled"
	attached   moment = "volume attached"
	ready      moment = "pod ready"
	deleted    moment = "deletion of the pod requested"
	podGone    moment = "Pod object removed"
	detached   moment = "VolumeAttachment removed"
	volumeGone moment = "PersistentVolume removed"
)

// watcher records when it first saw each moment of each pod, by the pod's name. It uses the times of the watch
// events, because the timestamps in objects have only whole seconds.
type watcher struct {
	mu      sync.Mutex
	seen    map[moment]map[string]time.Time
	claimOf map[string]string // PersistentVolume to claim
	changed chan struct{}     // receives a value after a moment was recorded
}

// selectedNode is the annotation with which the scheduler tells the provisioner the node of a claim's pod.
const selectedNode = "volume.kubernetes.io/selected-node"

// watch starts a watcher for the objects of a namespace.
func watch(ctx context.Context, client kubernetes.Interface, namespace string) (*watcher, error) {
	w := &watcher{seen: map[moment]map[string]time.Time{}, claimOf: map[string]string{}, changed: make(chan struct{}, 1)}
	factory := informers.NewSharedInformerFactory(client, 0)
	for _, one := range []struct {
		informer cache.SharedIndexInformer
		change   func(any)
		gone     func(any)
	}{
		{factory.Core().V1().Pods().Informer(), w.in(namespace, w.pod), w.in(namespace, func(o any) { w.note(podGone, o.(*corev1.Pod).Name) })},
		{factory.Core().V1().PersistentVolumeClaims().Informer(), w.in(namespace, w.claim), func(any) {}},
		{factory.Core().V1().PersistentVolumes().Informer(), w.volume(namespace), func(o any) { w.noteVolume(volumeGone, o.(*corev1.PersistentVolume).Name) }},
		{factory.Storage().V1().VolumeAttachments().Informer(), w.attachment, func(o any) { w.noteVolume(detached, *o.(*storagev1.VolumeAttachment).Spec.Source.PersistentVolumeName) }},
	} {
		if _, err := one.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    one.change,
			UpdateFunc: func(_, o any) { one.change(o) },
			DeleteFunc: func(o any) {
				if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
					o = last.Obj
				}
				one.gone(o)
			},
		}); err != nil {
			return nil, err
		}
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return w, ctx.Err()
}

// in returns a handler that ignores objects of other namespaces.
func (w *watcher) in(namespace string, handle func(any)) func(any) {
	return func(o any) {
		if o.(interface{ GetNamespace() string }).GetNamespace() == namespace {
			handle(o)
		}
	}
}

// note records a moment of the pod with a name, or of its claim, which has the same name. Only the first
// call for a moment and a name has an effect.
func (w *watcher) note(m moment, name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.seen[m] == nil {
		w.seen[m] = map[string]time.Time{}
	}
	if _, again := w.seen[m][name]; again {
		return
	}
	w.seen[m][name] = time.Now()
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// noteVolume records a moment of the claim that is bound to a PersistentVolume.
func (w *watcher) noteVolume(m moment, volume string) {
	w.mu.Lock()
	claim := w.claimOf[volume]
	w.mu.Unlock()
	if claim != "" {
		w.note(m, claim)
	}
}

// pod, claim, volume and attachment note the moments that an added or changed object shows.
func (w *watcher) pod(o any) {
	p := o.(*corev1.Pod)
	w.note(created, p.Name)
	if p.Spec.NodeName != "" {
		w.note(scheduled, p.Name)
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			w.note(ready, p.Name)
		}
	}
	if p.DeletionTimestamp != nil {
		w.note(deleted, p.Name)
	}
}

func (w *watcher) claim(o any) {
	c := o.(*corev1.PersistentVolumeClaim)
	if c.Annotations[selectedNode] != "" {
		w.note(selected, c.Name)
	}
	if c.Status.Phase == corev1.ClaimBound {
		w.note(bound, c.Name)
	}
}

func (w *watcher) volume(namespace string) func(any) {
	return func(o any) {
		v := o.(*corev1.PersistentVolume)
		if v.Spec.ClaimRef == nil || v.Spec.ClaimRef.Namespace != namespace {
			return
		}
		w.mu.Lock()
		w.claimOf[v.Name] = v.Spec.ClaimRef.Name
		w.mu.Unlock()
		w.note(provided, v.Spec.ClaimRef.Name)
	}
}

func (w *watcher) attachment(o any) {
	if a := o.(*storagev1.VolumeAttachment); a.Status.Attached {
		w.noteVolume(attached, *a.Spec.Source.PersistentVolumeName)
	}
}

// wait waits until the moment of n pods is recorded.
func (w *watcher) wait(ctx context.Context, m moment, n int) error {
	expired := time.After(timeout)
	for {
		w.mu.Lock()
		now := len(w.seen[m])
		w.mu.Unlock()
		if now >= n {
			return nil
		}
		select {
		case <-w.changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-expired:
			return fmt.Errorf("timed out after %v: got %q for %d of %d pods", timeout, m, now, n)
		}
	}
}

// phase is the mean time from one moment to the next.
type phase struct {
	name string
	took time.Duration
}

// phases returns the mean durations between the recorded moments. The phases of the creation begin with
// created, and those of the deletion with deleted.
func (w *watcher) phases() []phase {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []phase
	last := created
	for _, m := range []moment{selected, provided, bound, scheduled, attached, ready} {
		if len(w.seen[m]) > 0 {
			all = append(all, phase{fmt.Sprintf("%s → %s", last, m), w.mean(last, m)})
			last = m
		}
	}
	last = deleted
	for _, m := range []moment{podGone, detached, volumeGone} {
		if len(w.seen[m]) > 0 {
			all = append(all, phase{fmt.Sprintf("%s → %s", last, m), w.mean(last, m)})
			last = m
		}
	}
	return all
}

// mean returns the mean duration between two moments over all pods that have both.
func (w *watcher) mean(from, to moment) time.Duration {
	var sum time.Duration
	n := 0
	for name, end := range w.seen[to] {
		if begin, ok := w.seen[from][name]; ok {
			sum += end.Sub(begin)
			n++
		}
	}
	return sum / time.Duration(max(1, n))
}
