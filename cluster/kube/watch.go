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
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// watched holds views of objects. A watch updates the views. While the API server does not answer, they
// do not change.
type watched[T any] struct{ informer cache.SharedIndexInformer }

// cached is the part of an object that the informer keeps in memory: namespace and name, which are its
// key, and the view.
type cached[T any] struct {
	metav1.ObjectMeta
	view T
}

// resource is dynamic.ResourceInterface, which returns complete objects, or metadata.ResourceInterface,
// which returns only their metadata.
type resource[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// watchObjects watches the selected objects until ctx ends, and keeps the view that toView returns of each. It
// raises changed when all objects are read and after each change. description names the objects in logs.
func watchObjects[T any, L runtime.Object](ctx context.Context, description string, from resource[L], selector metav1.ListOptions, toView func(runtime.Object) (T, error), changed signal) watched[T] {
	informer := cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(listWatch(ctx, description, from, selector), from), nil, cache.SharedIndexInformerOptions{ObjectDescription: description})
	// These calls fail only if the informer already runs.
	_ = informer.SetTransform(toCached(toView))
	_ = informer.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {}) // listWatch logs the error
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

// watchOne watches the object with the given name. RBAC rules with resourceNames allow a watch only with
// this field selector.
func watchOne[T any](ctx context.Context, c *Client, kind schema.GroupVersionResource, namespace, name string, changed signal) watched[T] {
	selector := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()}
	return watchObjects(ctx, kind.Resource+"/"+name, c.watches.Resource(kind).Namespace(namespace), selector, viewObject[T], changed)
}

// toCached converts objects to cached. Informers may pass the result to it again.
func toCached[T any](toView func(runtime.Object) (T, error)) cache.TransformFunc {
	return func(o any) (any, error) {
		object, ok := o.(runtime.Object)
		if !ok {
			return o, nil
		}
		v, err := toView(object)
		if err != nil {
			return nil, err
		}
		m := object.(metav1.Object)
		return &cached[T]{metav1.ObjectMeta{Namespace: m.GetNamespace(), Name: m.GetName()}, v}, nil
	}
}

// listWatch lists and watches the selected objects, and logs errors.
func listWatch[L runtime.Object](ctx context.Context, description string, from resource[L], selector metav1.ListOptions) *cache.ListWatch {
	errs := errorLog{log: klog.FromContext(ctx), message: "Watching " + description + " failed; retrying"}
	narrow := func(o metav1.ListOptions) metav1.ListOptions {
		o.FieldSelector, o.LabelSelector = selector.FieldSelector, selector.LabelSelector
		return o
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			call, cancel := context.WithTimeout(ctx, callTimeout)
			defer cancel()
			list, err := from.List(call, narrow(o))
			errs.report(ctx, withoutURL(err))
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := from.Watch(ctx, narrow(o))
			if !listsInstead(err) {
				errs.report(ctx, withoutURL(err))
			}
			return w, err
		},
	}
}

// withoutURL removes the URL from an error. The URL contains a timeout that differs each time, so equal
// errors would look different.
func withoutURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// listsInstead reports whether the informer handles an error itself by a list, because the resource
// version is too old or the API server does not support WatchList.
func listsInstead(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsInvalid(err)
}

// viewObject converts an object of the dynamic client to its view.
func viewObject[T any](o runtime.Object) (T, error) {
	return view[T](o.(*unstructured.Unstructured).Object)
}

func (w watched[T]) synced() bool { return w.informer.HasSynced() }

// all returns the views in no particular order.
func (w watched[T]) all() []T {
	var out []T
	for _, o := range w.informer.GetStore().List() {
		out = append(out, o.(*cached[T]).view)
	}
	return out
}

// one returns the object of a watch of one object. found is false if the object does not exist.
func (w watched[T]) one() (object T, found bool) {
	for _, o := range w.all() {
		return o, true
	}
	return object, false
}
