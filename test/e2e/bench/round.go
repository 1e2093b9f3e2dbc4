package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	image    = "registry.k8s.io/pause:3.10.2"
	patience = 5 * time.Minute
)

// round is what one round of pods took.
type round struct {
	pods     int
	up, down time.Duration // all pods ready; all pods and volumes gone
	phases   []phase
	driver   driverShare
}

// way is how long one volume was on its way up and down, in the mean.
func (r round) way() time.Duration {
	var sum time.Duration
	for _, p := range r.phases {
		sum += p.took
	}
	return sum
}

// play creates pods, waits until all are ready, deletes them with their claims, and
// waits until nothing is left. Without a class the pods have an emptyDir.
func play(ctx context.Context, client kubernetes.Interface, namespace string, pods int, class, metrics string) (round, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return round{}, err
	}
	before, err := scrape(ctx, metrics)
	if err != nil {
		return round{}, err
	}
	w, err := watch(ctx, client, namespace)
	if err != nil {
		return round{}, err
	}
	began := time.Now()
	for i := range pods {
		if err := create(ctx, client, namespace, fmt.Sprintf("p%03d", i), class); err != nil {
			return round{}, err
		}
	}
	if err := w.wait(ctx, ready, pods); err != nil {
		return round{}, err
	}
	r := round{pods: pods, up: time.Since(began)}

	began = time.Now()
	at := metav1.DeleteOptions{}
	if err := client.CoreV1().Pods(namespace).DeleteCollection(ctx, at, metav1.ListOptions{}); err != nil {
		return r, err
	}
	if err := client.CoreV1().PersistentVolumeClaims(namespace).DeleteCollection(ctx, at, metav1.ListOptions{}); err != nil {
		return r, err
	}
	gone := podGone
	if class != "" {
		gone = volumeGone
	}
	if err := w.wait(ctx, gone, pods); err != nil {
		return r, err
	}
	r.down = time.Since(began)

	after, err := scrape(ctx, metrics)
	if err != nil {
		return r, err
	}
	if class != "" {
		r.phases, r.driver = w.phases(), after.since(before)
	}
	return r, client.CoreV1().Namespaces().Delete(ctx, namespace, at)
}

func create(ctx context.Context, client kubernetes.Interface, namespace, name, class string) error {
	source := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	if class != "" {
		claim := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PersistentVolumeClaimSpec{
				StorageClassName: &class,
				AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:        corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("64Mi")}},
			},
		}
		if _, err := client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, claim, metav1.CreateOptions{}); err != nil {
			return err
		}
		source = corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
	}
	grace := int64(1) // pause ends at once; 0 would be gone before the kubelet did anything
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers:                    []corev1.Container{{Name: "pause", Image: image, VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
			Volumes:                       []corev1.Volume{{Name: "data", VolumeSource: source}},
		},
	}
	_, err := client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
	return err
}
