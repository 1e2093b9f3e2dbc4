package kube

import (
	"context"
	"errors"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// watched are views of objects, kept in step with the API server. While that is
// away they are what they were.
type watched[T any] struct{ informer cache.SharedIndexInformer }

// kept is all that stays in memory of an object: what its key is made of, and the
// view.
type kept[T any] struct {
	metav1.ObjectMeta
	view T
}

// resource is what can be watched: dynamic.ResourceInterface with lists of whole
// objects, or metadata.ResourceInterface.
type resource[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// follow watches objects until ctx ends, and raises changed when all are there and
// after each change.
func follow[T any, L runtime.Object](ctx context.Context, what string, from resource[L], only metav1.ListOptions, see func(runtime.Object) (T, error), changed signal) watched[T] {
	informer := cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(listWatch(ctx, what, from, only), from), nil, cache.SharedIndexInformerOptions{ObjectDescription: what})
	// These fail only once an informer runs.
	_ = informer.SetTransform(keep(see))
	_ = informer.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {}) // listWatch has said it
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed.raise() },
		UpdateFunc: func(any, any) { changed.raise() },
		DeleteFunc: func(any) { changed.raise() },
	})
	go informer.RunWithContext(ctx)
	go func() {
		select {
		case <-ctx.Done():
		case <-informer.HasSyncedChecker().Done():
			changed.raise()
		}
	}()
	return watched[T]{informer}
}

// keep makes of objects what is kept of them. Informers call it again for what they
// got from it.
func keep[T any](see func(runtime.Object) (T, error)) cache.TransformFunc {
	return func(o any) (any, error) {
		object, ok := o.(runtime.Object)
		if !ok {
			return o, nil
		}
		v, err := see(object)
		if err != nil {
			return nil, err
		}
		m := object.(metav1.Object)
		return &kept[T]{metav1.ObjectMeta{Namespace: m.GetNamespace(), Name: m.GetName()}, v}, nil
	}
}

// listWatch logs each error once while it stays the same.
func listWatch[L runtime.Object](ctx context.Context, what string, from resource[L], only metav1.ListOptions) *cache.ListWatch {
	errs := complaints{log: klog.FromContext(ctx), message: "Watching " + what + " failed; it is tried again"}
	narrow := func(o metav1.ListOptions) metav1.ListOptions {
		o.FieldSelector, o.LabelSelector = only.FieldSelector, only.LabelSelector
		return o
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			call, cancel := context.WithTimeout(ctx, callTimeout)
			defer cancel()
			list, err := from.List(call, narrow(o))
			errs.hear(ctx, withoutURL(err))
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := from.Watch(ctx, narrow(o))
			if !listsInstead(err) {
				errs.hear(ctx, withoutURL(err))
			}
			return w, err
		},
	}
}

// withoutURL takes away what differs each time: a timeout.
func withoutURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// listsInstead tells of errors that are answered by a list: a version too old to
// watch from, and an API server that cannot begin a watch with what is there.
func listsInstead(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsInvalid(err)
}

// whole sees an object's view.
func whole[T any](o runtime.Object) (T, error) {
	return view[T](o.(*unstructured.Unstructured).Object)
}

// named selects one object, as rules with resourceNames want it.
func named(name string) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()}
}

func (w watched[T]) synced() bool { return w.informer.HasSynced() }

// all are those that are there, in no order.
func (w watched[T]) all() []T {
	var out []T
	for _, o := range w.informer.GetStore().List() {
		out = append(out, o.(*kept[T]).view)
	}
	return out
}

// one is the object of a watch of one.
func (w watched[T]) one() (object T, there bool) {
	for _, o := range w.all() {
		return o, true
	}
	return object, false
}
